/* AMX for machines that have AVX-512 but no tiles: the processor refuses each instruction, and a signal handler executes
   it as Intel's manual describes. So the program runs the code that the compiler made for AMX, with its registers and
   addresses. On a machine with AMX nothing is refused. Included before step.c. With $NO_TILES, the program gets no
   permission to use tiles. */
#define _GNU_SOURCE                 /* REG_RIP */
#include <immintrin.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static long request_tiles(long call, long request, long feature) {
    if (getenv("NO_TILES")) return -1;
    syscall(call, request, feature);
    return 0;
}
#define syscall request_tiles

static __thread struct {
    int is_configured;
    uint16_t row_bytes[8];
    uint8_t rows[8], data[8][16][64] __attribute__((aligned(64)));
} tile_state;

/* What the processor would answer with an exception. */
static void require(int is_allowed) {
    if (!is_allowed) abort();
}

static void configure_tiles(const uint8_t *shapes) {
    memset(&tile_state, 0, sizeof tile_state);
    require(shapes[0] == 1 && shapes[1] == 0);                                 /* palette, first row */
    for (int i = 2; i < 16; i++) require(shapes[i] == 0);
    for (int i = 32; i < 48; i++) require(shapes[i] == 0);
    for (int i = 56; i < 64; i++) require(shapes[i] == 0);
    memcpy(tile_state.row_bytes, shapes + 16, 16);
    memcpy(tile_state.rows, shapes + 48, 8);
    for (int i = 0; i < 8; i++) require(tile_state.row_bytes[i] <= 64 && tile_state.rows[i] <= 16);
    tile_state.is_configured = 1;
}

static void move_tile(int tile, char *memory, int64_t stride, int is_store) {
    require(tile_state.rows[tile] && tile_state.row_bytes[tile]);
    if (!is_store) memset(tile_state.data[tile], 0, sizeof tile_state.data[tile]);
    for (int row = 0; row < tile_state.rows[tile]; row++) {
        if (is_store) memcpy(memory + row * stride, tile_state.data[tile][row], tile_state.row_bytes[tile]);
        else memcpy(tile_state.data[tile][row], memory + row * stride, tile_state.row_bytes[tile]);
    }
}

static float as_number(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* TDPBF16PS */
static void multiply_tiles(int to, int first, int second) {
    require(to != first && to != second && first != second);
    require(tile_state.rows[to] == tile_state.rows[first] && tile_state.row_bytes[to] == tile_state.row_bytes[second]);
    require(tile_state.rows[to] && tile_state.row_bytes[first] == 4 * tile_state.rows[second]);
    for (int m = 0; m < tile_state.rows[to]; m++) {
        float sums[2][16] = {}, *total = (float *)tile_state.data[to][m];
        const uint16_t *a = (const uint16_t *)tile_state.data[first][m];
        for (int k = 0; k < tile_state.rows[second]; k++) {
            const uint16_t *b = (const uint16_t *)tile_state.data[second][k];
            for (int n = 0; n < 16; n++)
                for (int half = 0; half < 2; half++)
                    sums[half][n] = fmaf(as_number(a[2 * k + half]), as_number(b[2 * n + half]), sums[half][n]);
        }
        for (int n = 0; n < 16; n++) total[n] += sums[0][n] + sums[1][n];
    }
}

static int64_t register_value(const ucontext_t *context, int number) {
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context->uc_mcontext.gregs[places[number]];
}

/* Execute the instruction: C4, two bytes of a VEX prefix, operation code, ModRM and the operand in memory. */
static void execute_refused(int signal_number, siginfo_t *information, void *argument) {
    (void)signal_number, (void)information;
    ucontext_t *context = argument;
    const uint8_t *code = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP], *next = code + 5;
    int prefix = code[2] & 3, second = 15 - (code[2] >> 3 & 15), has_memory = code[4] >> 6 != 3;
    int tile = code[4] >> 3 & 7, other = code[4] & 7, base = other | (code[1] & 0x20 ? 0 : 8);
    require(code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0);
    int64_t memory = 0, stride = 0;
    if (has_memory) {
        int has_index = other == 4, displacement_bytes = code[4] >> 6 == 1 ? 1 : code[4] >> 6 == 2 ? 4 : 0;
        if (has_index) {
            uint8_t sib = *next++;
            int index = (sib >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
            base = (sib & 7) | (code[1] & 0x20 ? 0 : 8);
            if (index != 4) stride = register_value(context, index) << (sib >> 6);
        }
        int is_relative = !has_index && code[4] >> 6 == 0 && (base & 7) == 5;
        require(!(has_index && code[4] >> 6 == 0 && (base & 7) == 5));         /* no base: compilers do not use it */
        if (!is_relative) memory = register_value(context, base);
        int32_t displacement = 0;
        if (displacement_bytes == 1) displacement = (int8_t)*next;
        if (displacement_bytes == 4 || is_relative) memcpy(&displacement, next, 4), displacement_bytes = 4;
        next += displacement_bytes;
        memory += displacement + (is_relative ? (int64_t)next : 0);
    }
    require(code[3] == 0x49 || tile_state.is_configured);
    if (code[3] == 0x49 && prefix == 0 && has_memory) configure_tiles((const uint8_t *)memory);
    else if (code[3] == 0x49 && prefix == 0) memset(&tile_state, 0, sizeof tile_state);                /* TILERELEASE */
    else if (code[3] == 0x49 && prefix == 3) require(tile_state.is_configured),
        memset(tile_state.data[tile], 0, sizeof tile_state.data[tile]);                                  /* TILEZERO */
    else if (code[3] == 0x4b && prefix == 3) move_tile(tile, (char *)memory, stride, 0);
    else if (code[3] == 0x4b && prefix == 2) move_tile(tile, (char *)memory, stride, 1);
    else if (code[3] == 0x5c && prefix == 2) multiply_tiles(tile, other, second);
    else abort();
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)next;
}

__attribute__((constructor)) static void emulate_tiles(void) {
    struct sigaction action = {.sa_sigaction = execute_refused, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, 0);
}
