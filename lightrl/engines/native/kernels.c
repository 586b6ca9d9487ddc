/* The operations of a decode step that are not matrix products, for one model on one kind of processor.

   kernels.py compiles this file with
     IS_BFLOAT16  whether weights, hidden states and cache are bfloat16, otherwise float32
     DIM          size of a head
     GROUP        query heads of a key head
     TOGETHER     query heads that are computed together, a divisor of GROUP
     LANES        floats of a register; a divisor of DIM / 2, of the sizes of hidden states, and of the cache's capacity
     HAS_NORM     whether queries and keys are normed head by head

   All sums are float32. Results are rounded to the type of the weights once per function. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define CHUNKS 4 /* registers of positions that are scored together */
#define PARTS (DIM / LANES) /* registers of a head */
#define INLINE static inline __attribute__((always_inline))

#if IS_BFLOAT16
typedef uint16_t element;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE floats load(const element *from) {
    halves upper;
    memcpy(&upper, from, sizeof upper);
    return (floats)(__builtin_convertvector(upper, ints) << 16);
}

INLINE void store(element *to, floats values) {
    ints bits = (ints)values;
    halves upper = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves); /* to nearest even */
    memcpy(to, &upper, sizeof upper);
}

INLINE float load_one(const element *from) {
    uint32_t bits = (uint32_t)*from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store_one(element *to, float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    *to = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
typedef float element;

INLINE floats load(const element *from) { return *(const unaligned *)from; }
INLINE void store(element *to, floats values) { *(unaligned *)to = values; }
INLINE float load_one(const element *from) { return *from; }
INLINE void store_one(element *to, float value) { *to = value; }
#endif

INLINE floats choose(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }
INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE float sum(floats values) {
    union { floats all; four parts[LANES / 4]; } split = {values};
    four total = split.parts[0];
    for (int i = 1; i < LANES / 4; i++) total += split.parts[i];
    return (total[0] + total[1]) + (total[2] + total[3]);
}

INLINE float maximum(floats values) {
    union { floats all; four parts[LANES / 4]; } split = {values};
    four top = split.parts[0];
    for (int i = 1; i < LANES / 4; i++) {
        four_ints is_more = split.parts[i] > top;
        top = (four)(((four_ints)split.parts[i] & is_more) | ((four_ints)top & ~is_more));
    }
    return larger(larger(top[0], top[1]), larger(top[2], top[3]));
}

/* exp(x) for x <= 0, to 2 units in the last place: 2**n * exp(r) with |r| <= log(2) / 2, by Cephes' polynomial.
   0 below -87, where 2**n would soon have no exponent. */
INLINE floats exponential(floats x) {
    const floats zero = {0};
    ints is_tiny = x < -87.0f;
    x = choose(is_tiny, zero, x);
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); /* rounds towards zero */
    floats whole = __builtin_convertvector(n, floats);
    floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* log(2) in two parts */
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return choose(is_tiny, zero, (p * r * r + r + 1.0f) * (floats)((n + 127) << 23));
}

/* out = x * weight / sqrt(mean(x**2) + eps); x and out: [rows, width] */
void rms_norm(long rows, long width, const element *x, const element *weight, float eps, element *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const element *own = x + row * width;
        floats squares = {0};
        for (long i = 0; i < width; i += LANES) squares += load(own + i) * load(own + i);
        float scale = 1.0f / sqrtf(sum(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) store(out + row * width + i, load(own + i) * scale * load(weight + i));
    }
}

/* out = silu(gate) * up; gate_up: [rows, 2 * width], gates before ups; out: [rows, width] */
void gated(long rows, long width, const element *gate_up, element *out, int threads) {
    const floats zero = {0};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const element *gate = gate_up + 2 * row * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            floats x = load(gate + i), e = exponential(-(floats)((ints)x & 0x7fffffff));
            floats sigmoid = choose(x >= 0.0f, zero + 1.0f, e) / (1.0f + e);
            store(out + row * width + i, x * sigmoid * load(up + i));
        }
    }
}

/* Norms and rotates a head, and multiplies it by a factor. turns: the cosines of a position, then its signed sines */
INLINE void rotate(const element *x, const element *weight, float eps, const element *turns, float factor, float *out) {
    floats part[PARTS];
    for (int p = 0; p < PARTS; p++) part[p] = load(x + p * LANES);
#if HAS_NORM
    floats squares = {0};
    for (int p = 0; p < PARTS; p++) squares += part[p] * part[p];
    factor /= sqrtf(sum(squares) / DIM + eps);
    for (int p = 0; p < PARTS; p++) part[p] *= load(weight + p * LANES);
#endif
    for (int p = 0; p < PARTS; p++) {
        floats other = part[(p + PARTS / 2) % PARTS];
        floats turned = part[p] * load(turns + p * LANES) + other * load(turns + DIM + p * LANES);
        *(unaligned *)(out + p * LANES) = turned * factor;
    }
}

/* What some queries have read so far: mixed / total is the attention, with weights relative to exp(top). */
typedef struct {
    float top[TOGETHER], total[TOGETHER];
    floats mixed[TOGETHER][PARTS];
} reading;

/* Reads the positions start .. start + n * LANES - 1, of which those outside first .. stop - 1 do not count.
   n: a constant, 1 to CHUNKS. keys: [DIM, capacity]; values: [capacity, DIM] */
INLINE void read(long start, int n, long first, long stop, const float (*queries)[DIM], const element *keys,
                 const element *values, long capacity, reading *so_far) {
    floats scores[TOGETHER][CHUNKS], mixed[TOGETHER][PARTS];
    float weights[TOGETHER][CHUNKS * LANES] __attribute__((aligned(64)));
    for (int g = 0; g < TOGETHER; g++)
        for (int c = 0; c < n; c++) scores[g][c] = (floats){0};
    for (int d = 0; d < DIM; d++)
        for (int c = 0; c < n; c++) {
            floats key = load(keys + d * capacity + start + c * LANES);
            for (int g = 0; g < TOGETHER; g++) scores[g][c] += queries[g][d] * key;
        }
    for (int g = 0; g < TOGETHER; g++) {
        if (start < first || start + n * LANES > stop) {
            for (int c = 0; c < n; c++) *(floats *)&weights[g][c * LANES] = scores[g][c];
            for (long i = 0; i < n * LANES; i++)
                if (start + i < first || start + i >= stop) weights[g][i] = -INFINITY;
            for (int c = 0; c < n; c++) scores[g][c] = *(floats *)&weights[g][c * LANES];
        }
        floats high = scores[g][0], added = {0};
        for (int c = 1; c < n; c++) high = choose(scores[g][c] > high, scores[g][c], high);
        float top = larger(maximum(high), so_far->top[g]), kept = expf(so_far->top[g] - top);
        for (int c = 0; c < n; c++) {
            floats weight = exponential(scores[g][c] - top);
            *(floats *)&weights[g][c * LANES] = weight;
            added += weight;
        }
        so_far->top[g] = top;
        so_far->total[g] = so_far->total[g] * kept + sum(added);
        for (int p = 0; p < PARTS; p++) mixed[g][p] = so_far->mixed[g][p] * kept;
    }
    long last = stop - start < n * LANES ? stop - start : n * LANES;
    for (long i = start < first ? first - start : 0; i < last; i++)
        for (int p = 0; p < PARTS; p++) {
            floats value = load(values + (start + i) * DIM + p * LANES);
            for (int g = 0; g < TOGETHER; g++) mixed[g][p] += weights[g][i] * value;
        }
    memcpy(so_far->mixed, mixed, sizeof mixed);
}

/* Attends with some queries to the positions first .. stop - 1; out: [TOGETHER, DIM] */
INLINE void mix(long first, long stop, const float (*queries)[DIM], const element *keys, const element *values,
                long capacity, element *out) {
    reading so_far;
    memset(&so_far, 0, sizeof so_far);
    for (int g = 0; g < TOGETHER; g++) so_far.top[g] = -INFINITY;
    long at = first / LANES * LANES; /* so that no read goes beyond the capacity */
    for (; at + CHUNKS * LANES <= stop; at += CHUNKS * LANES)
        read(at, CHUNKS, first, stop, queries, keys, values, capacity, &so_far);
    switch ((stop - at + LANES - 1) / LANES) {
        case 1: read(at, 1, first, stop, queries, keys, values, capacity, &so_far); break;
        case 2: read(at, 2, first, stop, queries, keys, values, capacity, &so_far); break;
        case 3: read(at, 3, first, stop, queries, keys, values, capacity, &so_far); break;
        case 4: read(at, 4, first, stop, queries, keys, values, capacity, &so_far); break;
    }
    for (int g = 0; g < TOGETHER; g++)
        for (int p = 0; p < PARTS; p++)
            store(out + g * DIM + p * LANES, so_far.mixed[g][p] / so_far.total[g]);
}

#define LINE (64 / (long)sizeof(element)) /* numbers that are fetched together */
#define NEAR (4 << 20) /* bytes that a second-level cache may hold */

INLINE void fetch(const element *keys, const element *values, long stop, long capacity) {
    for (long at = 0; at < stop; at += LINE)
        for (int d = 0; d < DIM; d++) __builtin_prefetch(keys + d * capacity + at);
    for (long at = 0; at < stop * DIM; at += LINE) __builtin_prefetch(values + at);
}

/* Writes the key and the value of each row's position, then attends with its queries to the positions so far.

   projected:  [rows, GROUP * kv_heads + 2 * kv_heads, DIM], queries before keys before values
   turns:      [rows, 2, DIM], of the positions
   window:     number of positions that a query sees, 0 for all
   keys:       [rows, kv_heads, DIM, capacity]; values: [rows, kv_heads, capacity, DIM]
   out:        [rows, GROUP * kv_heads, DIM] */
void attend(long rows, long kv_heads, long capacity, const int64_t *positions, const element *projected,
            const element *query_weight, const element *key_weight, float eps, const element *turns, float scaling,
            long window, element *keys, element *values, element *out, int threads) {
    const long heads = GROUP * kv_heads;
    const int is_near = 2 * rows * kv_heads * capacity * DIM * (long)sizeof(element) <= NEAR;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 8)
    for (long unit = 0; unit < rows * kv_heads; unit++) {
        long row = unit / kv_heads, head = unit % kv_heads, position = positions[row];
        const element *own = projected + row * (heads + 2 * kv_heads) * DIM, *turn = turns + row * 2 * DIM;
        element *own_keys = keys + unit * DIM * capacity, *own_values = values + unit * capacity * DIM;
        float key[DIM], queries[TOGETHER][DIM];
        rotate(own + (heads + head) * DIM, key_weight, eps, turn, 1.0f, key);
        for (int d = 0; d < DIM; d++) store_one(own_keys + d * capacity + position, key[d]);
        memcpy(own_values + position * DIM, own + (heads + kv_heads + head) * DIM, DIM * sizeof(element));
        long first = window > 0 && position >= window ? position + 1 - window : 0;
        if (!is_near && unit + 1 < rows * kv_heads) /* others are faster without */
            fetch(own_keys + DIM * capacity, own_values + capacity * DIM, positions[(unit + 1) / kv_heads], capacity);
        for (long query = head * GROUP; query < (head + 1) * GROUP; query += TOGETHER) {
            for (int g = 0; g < TOGETHER; g++)
                rotate(own + (query + g) * DIM, query_weight, eps, turn, scaling, queries[g]);
            mix(first, position + 1, queries, own_keys, own_values, capacity, out + (row * heads + query) * DIM);
        }
    }
}

#define BLOCK 256 /* tokens whose weights are summed in one number; a multiple of LANES */

INLINE float highest(const element *logits, long count) {
    float top = -INFINITY;
    long i = 0;
    if (count >= LANES) {
        floats high = load(logits);
        for (i = LANES; i + LANES <= count; i += LANES) {
            floats more = load(logits + i);
            high = choose(more > high, more, high);
        }
        top = maximum(high);
    }
    for (; i < count; i++) top = larger(load_one(logits + i), top);
    return top;
}

/* Writes the weights exp(logit - top) and returns their sum. Not inlined: two calls must round alike. */
static __attribute__((noinline)) float weigh(const element *logits, long count, float top, float *weights) {
    floats added = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats weight = exponential(load(logits + i) - top);
        *(unaligned *)(weights + i) = weight;
        added += weight;
    }
    float total = sum(added);
    for (; i < count; i++) total += weights[i] = expf(load_one(logits + i) - top);
    return total;
}

/* Draws a token of each row: the first whose cumulative weight exceeds uniform * total, never one of weight 0.

   logits: [rows, vocab]; uniforms: [rows], in [0, 1); tokens and their logprobs: [rows] */
void draw(long rows, long vocab, const element *logits, const double *uniforms, int64_t *tokens, float *logprobs,
          int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        const element *own = logits + row * vocab;
        float weights[BLOCK], top = highest(own, vocab);
        long num_blocks = (vocab + BLOCK - 1) / BLOCK, block = 0;
        double sums[num_blocks], total = 0;
        for (long i = 0; i < num_blocks; i++) {
            long first = i * BLOCK;
            sums[i] = weigh(own + first, vocab - first < BLOCK ? vocab - first : BLOCK, top, weights);
            total += sums[i];
        }
        double left = uniforms[row] * total;
        while (block + 1 < num_blocks && left >= sums[block]) left -= sums[block++];
        for (; block > 0 && sums[block] == 0; block--) left = INFINITY; /* behind the last weight, by rounding */
        long first = block * BLOCK, count = vocab - first < BLOCK ? vocab - first : BLOCK, token = 0;
        weigh(own + first, count, top, weights);
        for (long i = 0; i < count && left >= 0; i++)
            if (weights[i] > 0) {
                token = i;
                left -= weights[i];
            }
        tokens[row] = first + token;
        logprobs[row] = load_one(own + first + token) - top - (float)log(total);
    }
}
