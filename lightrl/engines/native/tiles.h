/* What products by the tile instructions of x86 processors (AMX) have in common: permission, shapes, sizes. */

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_TILES 1

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of Linux */
#define TILE_REGISTERS 18         /* XFEATURE_XTILEDATA */
#define TILE 512                  /* numbers of a tile */
#define SETTLE __asm__ volatile("" ::: "memory") /* stores come before later loads of tiles, which gcc does not see */

/* Asks for the registers, which Linux keeps from a process that does not; returns whether it may use them. */
int can_multiply(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_REGISTERS) == 0; }

INLINE void configure(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_of_row[16];
        uint8_t num_rows[16];
    } shapes;
    memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) {
        shapes.bytes_of_row[i] = 64;
        shapes.num_rows[i] = 16;
    }
    _tile_loadconfig(&shapes);
    SETTLE;
}

#else
#define HAS_TILES 0

int can_multiply(void) { return 0; }

#endif
