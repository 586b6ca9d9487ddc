/* The sums of rows of bytes times two columns of factors, as fast as the rows are read.

   row_sums.py compiles this file with
     ROW  bytes of a row, a multiple of 128 */

#include <stdint.h>

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#define AHEAD 2048 /* bytes */

int can_sum(void) { return 1; }

/* out[0] and out[1] = rows @ column 0 and column 1

   rows:     [num_rows, ROW]
   columns:  [2, ROW]
   out:      [2, num_rows]

   The instruction takes bytes without a sign on one side: it gets 128 more of each, which the end takes off again. */
void sum_rows(long num_rows, const int8_t *rows, const int8_t *columns, int32_t *out, int threads) {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    int32_t excess[2] = {0, 0};
    for (int i = 0; i < ROW; i++) {
        excess[0] += 128 * columns[i];
        excess[1] += 128 * columns[ROW + i];
    }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < num_rows; row++) {
        const int8_t *own = rows + row * ROW;
        __m512i sums[2][2]; /* of each column, of even and of odd registers, so that no sum waits for the one before */
        for (int i = 0; i < 4; i++) sums[i / 2][i % 2] = _mm512_setzero_si512();
        for (int at = 0; at < ROW; at += 128) {
            for (int half = 0; half < 2; half++) {
                const int start = at + 64 * half;
                __builtin_prefetch(own + start + AHEAD); /* saves a fifth of a long read; may lie beyond the end */
                const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(own + start), sign);
                for (int column = 0; column < 2; column++) {
                    const __m512i factors = _mm512_loadu_si512(columns + column * ROW + start);
                    sums[column][half] = _mm512_dpbusd_epi32(sums[column][half], bytes, factors);
                }
            }
        }
        for (int column = 0; column < 2; column++) {
            const __m512i sum = _mm512_add_epi32(sums[column][0], sums[column][1]);
            out[column * num_rows + row] = _mm512_reduce_add_epi32(sum) - excess[column];
        }
    }
}

#else

int can_sum(void) { return 0; }

#endif
