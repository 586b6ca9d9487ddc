/* Products of a few rows with bfloat16 weights by the tile instructions of x86 processors (AMX).

   A tile of the rows is 16 rows by 32 inputs; one of the weights is 16 pairs of adjacent inputs by 16 outputs. Sums are
   float32 and are rounded once. */

#include "tiles.h"

#if HAS_TILES

/* Writes the tiles of 16 rows, of which those from `count` on are zeros, `stride` numbers apart. */
INLINE void gather(long count, long inputs, long stride, const uint16_t *x, uint16_t *tiles) {
    for (long row = 0; row < 16; row++)
        for (long i = 0; i < inputs; i += 32)
            _mm512_storeu_si512(tiles + i / 32 * stride + 32 * row,
                                row < count ? _mm512_loadu_si512(x + row * inputs + i) : _mm512_setzero_si512());
}

/* sums = 16 or 32 rows times 32 outputs, as [row tile][output tile][16 rows, 16 outputs].
   has_two: a constant, whether there is a second row tile. fetches_next: whether to fetch the weights of 32 more */
INLINE void multiply(int has_two, int fetches_next, long depth, long stride, const uint16_t *rows,
                     const uint16_t *weight, float (*sums)[2][256]) {
    const uint16_t *other = weight + depth * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < depth; i++) {
        _tile_loadd(4, weight + i * TILE, 64);
        _tile_loadd(5, other + i * TILE, 64);
        if (fetches_next)
            for (long line = 0; line < TILE; line += 32) {
                __builtin_prefetch(other + (depth + i) * TILE + line, 0, 2);
                __builtin_prefetch(other + (2 * depth + i) * TILE + line, 0, 2);
            }
        _tile_loadd(6, rows + i * stride, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if (has_two) {
            _tile_loadd(7, rows + i * stride + TILE, 64);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (has_two) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

INLINE __m512 widened(__m256i upper) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16); }

/* Adds some of 32 numbers, and zeros for the others, to two registers. */
INLINE void add(__mmask32 some, const uint16_t *from, __m512 *first, __m512 *second) {
    __m512i both = _mm512_maskz_loadu_epi16(some, from);
    *first = _mm512_add_ps(*first, widened(_mm512_castsi512_si256(both)));
    *second = _mm512_add_ps(*second, widened(_mm512_extracti64x4_epi64(both, 1)));
}

/* out = x @ weight.T + bias + added

   x:       [rows, 32 * depth]
   weight:  [outputs, rounded up to a multiple of 32 / 16, depth, 16 pairs of inputs, 16 outputs, 2]
   bias:    [outputs] or NULL; added: [rows, outputs], also `out` itself, or NULL
   tiles:   memory for the rows, rounded up to a multiple of 16
   out:     [rows, outputs] */
void product(long rows, long depth, long outputs, const uint16_t *x, const uint16_t *weight, const uint16_t *bias,
             const uint16_t *added, uint16_t *tiles, uint16_t *out, int threads) {
    const long stride = (rows + 15) / 16 * TILE;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (long row = 0; row < rows; row += 16)
            gather(rows - row, 32 * depth, stride, x + row * 32 * depth, tiles + row / 16 * TILE);
        configure();
#pragma omp for
        for (long output = 0; output < outputs; output += 32) {
            const uint16_t *own = weight + output * 32 * depth;
            const __mmask32 some = outputs - output < 32 ? (1u << (outputs - output)) - 1 : ~0u;
            for (long row = 0; row < rows; row += 32) {
                float sums[2][2][256] __attribute__((aligned(64)));
                const int fetches_next = row == 0 && output + 32 < outputs;
                const uint16_t *of_rows = tiles + row / 16 * TILE;
                if (rows - row > 16)
                    multiply(1, fetches_next, depth, stride, of_rows, own, sums);
                else
                    multiply(0, fetches_next, depth, stride, of_rows, own, sums);
                for (long i = 0; i < 32 && row + i < rows; i++) {
                    const long at = (row + i) * outputs + output;
                    __m512 first = _mm512_load_ps(sums[i / 16][0] + i % 16 * 16);
                    __m512 second = _mm512_load_ps(sums[i / 16][1] + i % 16 * 16);
                    if (bias) add(some, bias + output, &first, &second);
                    if (added) add(some, added + at, &first, &second);
                    _mm512_mask_storeu_epi16(out + at, some, (__m512i)_mm512_cvtne2ps_pbh(second, first));
                }
            }
        }
        _tile_release();
    }
}

#endif
