"""The commands in helm's notes. Pure."""


def commands_of(notes: str) -> list[str]:
    """Return the commands: lines indented by five spaces, joined with their continuation lines."""
    found: list[str] = []
    is_open = False
    for line in notes.splitlines():
        typed = line.removeprefix("     ")
        if typed == line:
            is_open = False
            continue
        if is_open:
            found[-1] += f"\n{typed}"
        elif typed.startswith(("kubectl", "curl")):
            found.append(typed)
        is_open = bool(found) and (typed.endswith("\\") or ("<<'YAML'" in found[-1] and typed != "YAML"))
    return found
