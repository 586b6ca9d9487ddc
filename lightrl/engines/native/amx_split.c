/* Products of a few rows with float32 weights by the tile instructions of x86 processors (AMX).

   The instructions multiply bfloat16 numbers. A float32 number has three times as many significant bits, so it is the
   exact sum of three of them, of falling size. Six of the nine products of such parts are added up; the other three are
   below the precision of float32. Weights are split when they are read, since three parts would be more to read.

   A tile of the weights is 16 outputs by 32 inputs; one of the rows is 16 pairs of adjacent inputs by 16 rows.

   amx_split.py compiles this file with
     MOST_ROWS  rows of a product at most, a multiple of 32 */

#include "tiles.h"

#if HAS_TILES

#define PARTS 3
#define PAIR (2 * PARTS * TILE) /* numbers of two tiles and their parts */
#define LONGEST 4               /* steps of 32 inputs that are split at a time */

INLINE __m512 widened(__m256i upper) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16); }

/* Writes the parts of 32 numbers: what is left, rounded to bfloat16. The last one is exact, unless it is below 2^-126,
   which counts as 0. Infinity, and the 0.2 % below it that bfloat16 lacks, give NaN. */
INLINE void split(const float *from, __m512i *parts) {
    __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + 16);
    for (int part = 0; part < PARTS; part++) {
        parts[part] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        first = _mm512_sub_ps(first, widened(_mm512_castsi512_si256(parts[part])));
        second = _mm512_sub_ps(second, widened(_mm512_extracti64x4_epi64(parts[part], 1)));
    }
}

INLINE void transpose(__m512i *rows) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(other[i], other[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(other[i], other[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(other[i + 1], other[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(other[i + 1], other[i + 3]);
    }
    for (int i = 0; i < 16; i++) {
        const int even = i % 4 + i / 8 * 8; /* i / 4 % 2: the even or the odd quarters of two registers */
        other[i] = i / 4 % 2 ? _mm512_shuffle_i32x4(rows[even], rows[even + 4], 0xdd)
                             : _mm512_shuffle_i32x4(rows[even], rows[even + 4], 0x88);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(other[i], other[i + 8], 0xdd);
    }
}

/* Writes the tiles of 16 rows, of which those from `count` on are zeros, two tiles apart. */
INLINE void gather(long count, long depth, const float *x, uint16_t *tiles) {
    for (long step = 0; step < depth; step++) {
        __m512i all[PARTS][16];
        for (long row = 0; row < 16; row++) {
            __m512i parts[PARTS] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
            if (row < count) split(x + (row * depth + step) * 32, parts);
            for (int part = 0; part < PARTS; part++) all[part][row] = parts[part];
        }
        for (int part = 0; part < PARTS; part++) {
            transpose(all[part]);
            for (int pair = 0; pair < 16; pair++)
                _mm512_storeu_si512(tiles + step * PAIR + part * TILE + 32 * pair, all[part][pair]);
        }
    }
}

/* sums += 32 outputs times 16 or 32 rows, as [row tile][output tile][16 outputs, 16 rows].
   has_two: a constant, whether there is a second row tile. is_first: whether sums are 0 before
   next: the weights to fetch meanwhile, of which this is one of `shares` calls that do so, or NULL */
INLINE void multiply(int has_two, int is_first, long steps, const uint16_t *rows, const uint16_t *weight,
                     float (*sums)[2][256], const float *next, long inputs, long share, long shares) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0][0], 64);
        _tile_loadd(1, sums[0][1], 64);
        if (has_two) {
            _tile_loadd(2, sums[1][0], 64);
            _tile_loadd(3, sums[1][1], 64);
        }
    }
    for (long step = 0; step < steps; step++) {
        const uint16_t *own = weight + step * PAIR, *of_rows = rows + step * PAIR;
#pragma GCC unroll 3
        for (int part = 0; part < PARTS; part++) {
            _tile_loadd(4, own + part * TILE, 64);
            _tile_loadd(5, own + (PARTS + part) * TILE, 64);
#pragma GCC unroll 3
            for (int other = 0; other < PARTS - part; other++) {
                _tile_loadd(6, of_rows + other * TILE, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (has_two) {
                    _tile_loadd(7, of_rows + (PARTS + other) * TILE, 64);
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        for (long output = share; next && output < 32; output += shares) {
            __builtin_prefetch(next + output * inputs + step * 32, 0, 2);
            __builtin_prefetch(next + output * inputs + step * 32 + 16, 0, 2);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (has_two) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
}

/* Writes 16 rows by 16 outputs of which only some exist: out = sums + bias + added. */
INLINE void write_out(long rows, long outputs, __mmask16 some, const float *sums, const float *bias,
                      const float *added, float *out) {
    __m512i all[16];
    for (int i = 0; i < 16; i++) all[i] = _mm512_load_si512(sums + 16 * i);
    transpose(all);
    for (long row = 0; row < 16 && row < rows; row++) {
        __m512 values = (__m512)all[row];
        if (bias) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(some, bias));
        if (added) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(some, added + row * outputs));
        _mm512_mask_storeu_ps(out + row * outputs, some, values);
    }
}

/* out = x @ weight.T + bias + added

   x:       [rows, 32 * depth]
   weight:  [outputs, 32 * depth]
   bias:    [outputs] or NULL; added: [rows, outputs], also `out` itself, or NULL
   tiles:   memory for 3 times the rows, rounded up to a multiple of 32
   out:     [rows, outputs] */
void product(long rows, long depth, long outputs, const float *x, const float *weight, const float *bias,
             const float *added, uint16_t *tiles, float *out, int threads) {
    const long inputs = 32 * depth, blocks = (rows + 31) / 32;
    const long length = blocks > 2 ? LONGEST : LONGEST / 2; /* of many rows, more of the time goes to the sums */
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (long row = 0; row < rows; row += 16)
            gather(rows - row, depth, x + row * inputs, tiles + row / 32 * depth * PAIR + row / 16 % 2 * PARTS * TILE);
        configure();
        uint16_t parts[LONGEST * PAIR] __attribute__((aligned(64)));
        float sums[MOST_ROWS / 32][2][2][256] __attribute__((aligned(64)));
#pragma omp for
        for (long output = 0; output < outputs; output += 32) {
            const long left = outputs - output < 32 ? outputs - output : 32;
            for (long start = 0; start < depth; start += length) {
                const long steps = depth - start < length ? depth - start : length;
                const float *from = weight + output * inputs + start * 32;
                for (long i = 0; i < 32; i++)
                    for (long step = 0; step < steps; step++) {
                        __m512i split_up[PARTS] = {_mm512_setzero_si512(), _mm512_setzero_si512(),
                                                   _mm512_setzero_si512()};
                        if (i < left) split(from + i * inputs + step * 32, split_up);
                        for (int part = 0; part < PARTS; part++)
                            _mm512_store_si512(
                                parts + step * PAIR + (i / 16 * PARTS + part) * TILE + i % 16 * 32, split_up[part]);
                    }
                SETTLE;
                const float *next = start + length < depth ? from + 32 * length
                                    : output + 64 <= outputs ? weight + (output + 32) * inputs
                                                             : NULL;
                for (long block = 0; block < blocks; block++) {
                    const uint16_t *of_rows = tiles + (block * depth + start) * PAIR;
                    if (rows - 32 * block > 16)
                        multiply(1, start == 0, steps, of_rows, parts, sums[block], next, inputs, block, blocks);
                    else
                        multiply(0, start == 0, steps, of_rows, parts, sums[block], next, inputs, block, blocks);
                }
            }
            for (long row = 0; row < rows; row += 16)
                for (int half = 0; half < 2 && 16 * half < left; half++) {
                    const __mmask16 some = left - 16 * half < 16 ? (1u << (left - 16 * half)) - 1 : 0xffff;
                    const long at = row * outputs + output + 16 * half;
                    write_out(rows - row, outputs, some, sums[row / 32][row / 16 % 2][half],
                              bias ? bias + output + 16 * half : NULL, added ? added + at : NULL, out + at);
                }
        }
        _tile_release();
    }
}

#endif
