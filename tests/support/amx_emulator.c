/* AMX's tile instructions in user space, for tests on CPUs without them: the machine code that kernels are compiled to
 * runs as it is, and each tile instruction traps and is computed here. Preloaded into a process (LD_PRELOAD).
 *
 * What the hardware refuses ends the process by the same signal: a tile instruction without the permission, without a
 * configuration or with shapes that do not fit together (SIGILL), a configuration that breaks the palette's limits
 * (SIGSEGV). Arithmetic follows the pseudo-code of Intel's manual, volume 2, "TDPBF16PS" and "TDPBUSD".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_TILE_DATA = 18 };
enum { DAZ_AND_FTZ = 0x8040 };

typedef struct {
    uint8_t configured, rows[TILES];
    uint16_t row_bytes[TILES];
    uint8_t data[TILES][ROWS][ROW_BYTES];
} State;

/* Preloading gives it room before the program begins: a trap must not allocate. */
static __thread State state __attribute__((tls_model("initial-exec"), aligned(64)));
static atomic_int permitted;

/* Read by the tests. */
atomic_long amx_bfloat16_products, amx_byte_products, amx_configured_threads, amx_tile_loads;

/* ---- The permission ---- */

static long raw_syscall(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

long syscall(long number, ...) {
    va_list given;
    va_start(given, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(given, long);
    va_end(given);
    if (number == SYS_arch_prctl && a[0] == ARCH_REQ_XCOMP_PERM && a[1] == XFEATURE_TILE_DATA) {
        atomic_store(&permitted, 1);
        return 0;
    }
    long result = raw_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (result >= -4095 && result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

/* ---- Faults ---- */

typedef struct {
    int signal;
    const char *reason;
} Fault;

static const Fault fine = {0, 0};

static Fault undefined(const char *reason) { return (Fault){SIGILL, reason}; }

static Fault unprotected(const char *reason) { return (Fault){SIGSEGV, reason}; }

/* ---- Decoding: VEX.128.0F38.W0 ---- */

typedef struct {
    int opcode, prefix, reg, rm, vvvv, is_memory, has_sib, length;
    uint64_t base, stride; /* of a memory operand; a SIB's scaled index is the stride */
} Instruction;

enum { NO_PREFIX, P66, PF3, PF2 };

static uint64_t general_register(const ucontext_t *context, int number) {
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)context->uc_mcontext.gregs[places[number]];
}

static int decode(const uint8_t *code, const ucontext_t *context, Instruction *found) {
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84)) return 0;
    int r = !(code[1] & 0x80) << 3, x = !(code[1] & 0x40) << 3, b = !(code[1] & 0x20) << 3;
    found->prefix = code[2] & 3;
    found->vvvv = (~code[2] >> 3) & 15;
    found->opcode = code[3];
    int modrm = code[4], mod = modrm >> 6, at = 5;
    found->reg = ((modrm >> 3) & 7) | r;
    found->rm = (modrm & 7) | b;
    found->is_memory = mod != 3;
    found->has_sib = found->is_memory && (modrm & 7) == 4;
    found->base = found->stride = 0;
    int displaced = mod == 1 ? 1 : mod == 2 ? 4 : 0, relative = 0;
    if (found->has_sib) {
        int sib = code[at++], index = ((sib >> 3) & 7) | x, base = sib & 7;
        if (index != 4) found->stride = general_register(context, index) << (sib >> 6);
        if (base == 5 && mod == 0)
            displaced = 4;
        else
            found->base = general_register(context, base | b);
    } else if (found->is_memory) {
        if ((modrm & 7) == 5 && mod == 0) {
            displaced = 4;
            relative = 1;
        } else {
            found->base = general_register(context, found->rm);
        }
    }
    if (displaced == 1) found->base += (uint64_t)(int64_t)(int8_t)code[at];
    if (displaced == 4) {
        int32_t by;
        memcpy(&by, code + at, 4);
        found->base += (uint64_t)(int64_t)by;
    }
    found->length = at + displaced;
    if (relative) found->base += (uint64_t)context->uc_mcontext.gregs[REG_RIP] + (uint64_t)found->length;
    return 1;
}

/* ---- The instructions ---- */

static void set_configured(int configured) {
    if (state.configured != configured) atomic_fetch_add(&amx_configured_threads, configured ? 1 : -1);
    memset(&state, 0, sizeof state);
    state.configured = (uint8_t)configured;
}

static Fault load_configuration(const uint8_t *given) {
    State wanted;
    memset(&wanted, 0, sizeof wanted);
    if (given[0] > 1) return unprotected("no such palette");
    if (given[1]) return unprotected("start_row is not 0 outside an interrupted instruction");
    for (int i = 2; i < 16; i++)
        if (given[i]) return unprotected("a reserved byte is set");
    for (int tile = 0; tile < 16; tile++) {
        int row_bytes = given[16 + 2 * tile] | given[17 + 2 * tile] << 8, rows = given[48 + tile];
        if (tile >= TILES && (row_bytes || rows)) return unprotected("there are eight tiles");
        if (row_bytes > ROW_BYTES || rows > ROWS) return unprotected("a tile has at most 16 rows of 64 bytes");
        if (!row_bytes != !rows) return unprotected("a tile has rows or bytes of them, not both");
        if (tile < TILES) wanted.rows[tile] = (uint8_t)rows, wanted.row_bytes[tile] = (uint16_t)row_bytes;
    }
    set_configured(given[0] == 1);
    if (given[0] == 1) {
        memcpy(state.rows, wanted.rows, sizeof wanted.rows);
        memcpy(state.row_bytes, wanted.row_bytes, sizeof wanted.row_bytes);
    }
    return fine;
}

static void store_configuration(uint8_t *target) {
    memset(target, 0, 64);
    target[0] = state.configured;
    for (int tile = 0; tile < TILES; tile++) {
        memcpy(target + 16 + 2 * tile, &state.row_bytes[tile], 2);
        target[48 + tile] = state.rows[tile];
    }
}

static int is_usable(int tile) { return tile < TILES && state.configured && state.rows[tile]; }

static void clear(int tile) { memset(state.data[tile], 0, sizeof state.data[tile]); }

static Fault move_tile(const Instruction *it, int is_store) {
    if (!it->has_sib || it->vvvv) return undefined("a tile is addressed by base and stride");
    if (!is_usable(it->reg)) return undefined("a tile is loaded or stored that is not configured");
    if (!is_store) clear(it->reg), atomic_fetch_add(&amx_tile_loads, 1);
    for (int row = 0; row < state.rows[it->reg]; row++) {
        uint8_t *place = (uint8_t *)(it->base + (uint64_t)row * it->stride);
        uint8_t *held = state.data[it->reg][row];
        memcpy(is_store ? place : held, is_store ? held : place, state.row_bytes[it->reg]);
    }
    return fine;
}

static float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static void multiply_bfloat16(int target, int left, int right) {
    for (int m = 0; m < state.rows[target]; m++) {
        float even[ROW_BYTES / 4] = {0}, odd[ROW_BYTES / 4] = {0}, sums[ROW_BYTES / 4];
        for (int k = 0; k < state.row_bytes[left] / 4; k++) {
            uint16_t a[2], b[ROW_BYTES / 2];
            memcpy(a, state.data[left][m] + 4 * k, 4);
            memcpy(b, state.data[right][k], ROW_BYTES);
            float first = widened(a[0]), second = widened(a[1]);
            for (int n = 0; n < ROW_BYTES / 4; n++) {
                even[n] = __builtin_fmaf(first, widened(b[2 * n]), even[n]);
                odd[n] = __builtin_fmaf(second, widened(b[2 * n + 1]), odd[n]);
            }
        }
        memcpy(sums, state.data[target][m], ROW_BYTES);
        for (int n = 0; n < state.row_bytes[target] / 4; n++) sums[n] += even[n] + odd[n];
        memcpy(state.data[target][m], sums, ROW_BYTES);
    }
}

static void multiply_bytes(int target, int left, int right, int left_signed, int right_signed) {
    for (int m = 0; m < state.rows[target]; m++) {
        int32_t sums[ROW_BYTES / 4];
        memcpy(sums, state.data[target][m], ROW_BYTES);
        for (int k = 0; k < state.row_bytes[left] / 4; k++)
            for (int n = 0; n < state.row_bytes[target] / 4; n++)
                for (int byte = 0; byte < 4; byte++) {
                    uint8_t a = state.data[left][m][4 * k + byte], b = state.data[right][k][4 * n + byte];
                    int32_t wide_a = left_signed ? (int8_t)a : a, wide_b = right_signed ? (int8_t)b : b;
                    sums[n] = (int32_t)((uint32_t)sums[n] + (uint32_t)(wide_a * wide_b));
                }
        memcpy(state.data[target][m], sums, ROW_BYTES);
    }
}

static Fault multiply(const Instruction *it) {
    int target = it->reg, left = it->rm, right = it->vvvv;
    if (it->is_memory) return undefined("a product has no memory operand");
    if (!is_usable(target) || !is_usable(left) || !is_usable(right))
        return undefined("a product of a tile that is not configured");
    if (target == left || target == right || left == right) return undefined("the tiles of a product are not three");
    if (state.row_bytes[target] % 4 || state.row_bytes[left] % 4 || state.row_bytes[right] % 4)
        return undefined("rows of a product are not whole units");
    if (state.rows[target] != state.rows[left] || state.row_bytes[left] != 4 * state.rows[right] ||
        state.row_bytes[target] != state.row_bytes[right])
        return undefined("the shapes of a product do not fit together");
    if (it->opcode == 0x5C) {
        if (it->prefix != PF3) return undefined("only TDPBF16PS of its kind is emulated");
        multiply_bfloat16(target, left, right);
        atomic_fetch_add(&amx_bfloat16_products, 1);
        return fine;
    }
    multiply_bytes(target, left, right, it->prefix == PF2 || it->prefix == PF3, it->prefix == PF2 || it->prefix == P66);
    atomic_fetch_add(&amx_byte_products, 1);
    return fine;
}

static Fault execute(const Instruction *it) {
    if (!atomic_load(&permitted)) return undefined("the process has no permission to use tiles");
    switch (it->opcode) {
    case 0x49:
        if (it->vvvv) return undefined("vvvv is used");
        if (it->is_memory && it->prefix == NO_PREFIX && it->reg == 0)
            return load_configuration((const uint8_t *)(it->base + it->stride));
        if (it->is_memory && it->prefix == P66 && it->reg == 0) {
            store_configuration((uint8_t *)(it->base + it->stride));
            return fine;
        }
        if (!it->is_memory && it->prefix == NO_PREFIX && it->reg == 0 && it->rm == 0) {
            set_configured(0);
            return fine;
        }
        if (!it->is_memory && it->prefix == PF2 && it->rm == 0) {
            if (!is_usable(it->reg)) return undefined("a tile is zeroed that is not configured");
            clear(it->reg);
            return fine;
        }
        return undefined("an unknown form of 0F38 49");
    case 0x4B:
        if (!it->is_memory || it->prefix == NO_PREFIX) return undefined("an unknown form of 0F38 4B");
        return move_tile(it, it->prefix == PF3);
    case 0x5C:
    case 0x5E:
        return multiply(it);
    }
    return undefined("an instruction that is not emulated");
}

static void say(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return;
}

static void trapped(int number, siginfo_t *info, void *given) {
    ucontext_t *context = given;
    Instruction it;
    Fault fault = undefined("an instruction that is none of AMX");
    (void)number, (void)info;
    _mm_setcsr(_mm_getcsr() | DAZ_AND_FTZ); /* this handler's own: the interrupted code keeps what it had */
    if (decode((const uint8_t *)context->uc_mcontext.gregs[REG_RIP], context, &it)) fault = execute(&it);
    if (!fault.signal) {
        context->uc_mcontext.gregs[REG_RIP] += it.length;
        return;
    }
    say("amx_emulator: ");
    say(fault.reason);
    say("\n");
    signal(fault.signal, SIG_DFL);
    kill(getpid(), fault.signal);
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = trapped;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, 0);
}
