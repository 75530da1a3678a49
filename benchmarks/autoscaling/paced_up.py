"""``quire up`` with paced engines: python paced_up.py OPTIONS_JSON FILE PORT. Speaks JSON lines, ends on Ctrl-C."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from quire_cli.local.host import Commands, installed_commands
from quire_cli.local.up import Up, UpOptions
from quire_cli.local.views import JsonLines

HERE = Path(__file__).parent


async def serve(options: str, file: Path, port: int) -> None:
    engine = (sys.executable, str(HERE / "paced_engine.py"), options)
    commands = Commands(engine=engine, gateway=installed_commands().gateway)
    run = Up(
        UpOptions(file=file, port=port, exit_after_seconds=None, environ=os.environ, commands=commands),
        JsonLines(sys.stdout, on_gone=lambda: os.kill(os.getpid(), signal.SIGTERM)),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, run.stop)
    await run.run()


if __name__ == "__main__":
    # Where the engine process finds paced_engine.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
