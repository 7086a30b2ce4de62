/* Blocks of weights in few bits: the memory layout of each kind, and its decoding to integers, scales and minima.

   A weight is d * u + m. Kinds of up to 6 bits have u from 0 and a d and an m for each group of 16 or 32 inputs. Kinds of 8
   bits have u around 0, a d for each 32 inputs and no m. The layouts are those of the GGUF specification (ggml-common.h in
   ggml), and our own two: an int8 weight with a scale an output, and an int4 weight of `dinfer.core.kernels.packed.pack`. */

#include "vectors.h"

static inline float half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

static inline float bfloat_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    uint32_t wide = (uint32_t)bits << 16;
    float found;
    memcpy(&found, &wide, 4);
    return found;
}

/* The two halves of `n` bytes: low four bits, then high four bits. */
static inline void nibbles(const uint8_t *from, uint8_t *u, int n) {
    for (int i = 0; i < n; i++) u[i] = from[i] & 15, u[n + i] = from[i] >> 4;
}

/* VNNI multiplies unsigned by signed bytes, so for VNNI values are from 0 on, like those of fewer bits. */
#if defined __AVX512VNNI__ || defined __AVXVNNI__
#define Q8_0_BITS 7
#else
#define Q8_0_BITS 8
#endif
static void q8_0(const uint8_t *from, uint8_t *u, float *d, float *m) {
    *d = half_at(from);
    if (Q8_0_BITS == 8) {
        memcpy(u, from + 2, 32);
        return;
    }
    *m = -128 * *d;
    for (int i = 0; i < 32; i++) u[i] = from[2 + i] ^ 128;
}

static void q4_0(const uint8_t *from, uint8_t *u, float *d, float *m) {
    *d = half_at(from), *m = -8 * *d;
    nibbles(from + 2, u, 16);
}

static void q4_1(const uint8_t *from, uint8_t *u, float *d, float *m) {
    *d = half_at(from), *m = half_at(from + 2);
    nibbles(from + 4, u, 16);
}

static inline void fifth_bit(const uint8_t *from, uint8_t *u) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int i = 0; i < 32; i++) u[i] |= (bits >> i & 1) << 4;
}

static void q5_0(const uint8_t *from, uint8_t *u, float *d, float *m) {
    *d = half_at(from), *m = -16 * *d;
    nibbles(from + 6, u, 16), fifth_bit(from + 2, u);
}

static void q5_1(const uint8_t *from, uint8_t *u, float *d, float *m) {
    *d = half_at(from), *m = half_at(from + 2);
    nibbles(from + 8, u, 16), fifth_bit(from + 4, u);
}

static void iq4_nl(const uint8_t *from, uint8_t *u, float *d, float *m) {
    static const int8_t value[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    *d = half_at(from);
    nibbles(from + 2, u, 16);
    for (int i = 0; i < 32; i++) u[i] = (uint8_t)value[u[i]];
}

static void q2_k(const uint8_t *from, uint8_t *u, float *d, float *m) {
    float scale = half_at(from + 80), least = half_at(from + 82);
    for (int g = 0; g < 16; g++) d[g * LANES] = scale * (from[g] & 15), m[g * LANES] = -least * (from[g] >> 4);
    for (int c = 0; c < 8; c++)
        for (int i = 0; i < 32; i++) u[c * 32 + i] = from[16 + c / 4 * 32 + i] >> c % 4 * 2 & 3;
}

static void q3_k(const uint8_t *from, uint8_t *u, float *d, float *m) {
    const uint8_t *s = from + 96;
    float scale = half_at(from + 108);
    for (int g = 0; g < 16; g++) {
        int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> g / 4 * 2 & 3;
        d[g * LANES] = scale * ((low | high << 4) - 32), m[g * LANES] = -4 * d[g * LANES];
    }
    for (int c = 0; c < 8; c++)
        for (int i = 0; i < 32; i++)
            u[c * 32 + i] = (from[32 + c / 4 * 32 + i] >> c % 4 * 2 & 3) | (from[i] >> c & 1) << 2;
}

/* The eight 6-bit scales and minima of Q4_K and Q5_K. */
static inline void scales_k(const uint8_t *from, float *d, float *m) {
    float scale = half_at(from), least = half_at(from + 2);
    const uint8_t *s = from + 4;
    for (int g = 0; g < 8; g++) {
        int a = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        int b = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        d[g * LANES] = scale * a, m[g * LANES] = -least * b;
    }
}

static void q4_k(const uint8_t *from, uint8_t *u, float *d, float *m) {
    scales_k(from, d, m);
    for (int c = 0; c < 4; c++) nibbles(from + 16 + c * 32, u + c * 64, 32);
}

static void q5_k(const uint8_t *from, uint8_t *u, float *d, float *m) {
    scales_k(from, d, m);
    for (int c = 0; c < 4; c++) {
        nibbles(from + 48 + c * 32, u + c * 64, 32);
        for (int i = 0; i < 32; i++) {
            u[c * 64 + i] |= (from[16 + i] >> 2 * c & 1) << 4;
            u[c * 64 + 32 + i] |= (from[16 + i] >> (2 * c + 1) & 1) << 4;
        }
    }
}

static void q6_k(const uint8_t *from, uint8_t *u, float *d, float *m) {
    float scale = half_at(from + 208);
    for (int g = 0; g < 16; g++) d[g * LANES] = scale * (int8_t)from[192 + g], m[g * LANES] = -32 * d[g * LANES];
    for (int c = 0; c < 2; c++) {
        const uint8_t *low = from + c * 64, *high = from + 128 + c * 32;
        uint8_t *to = u + c * 128;
        for (int i = 0; i < 32; i++) {
            to[i] = (low[i] & 15) | (high[i] & 3) << 4;
            to[32 + i] = (low[32 + i] & 15) | (high[i] >> 2 & 3) << 4;
            to[64 + i] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
            to[96 + i] = low[32 + i] >> 4 | high[i] >> 6 << 4;
        }
    }
}

typedef struct {
    int values, bytes; /* of a block */
    int group;         /* inputs that share a d and an m */
    int bits;          /* of u; 8: around 0, without m; 7: 8 with m, by VNNI alone */
    void (*decode)(const uint8_t *from, uint8_t *u, float *d, float *m); /* d and m of group g go to place g * LANES */
} Kind;

enum { INT8, INT4, FIRST_BLOCK, Q8_0 = FIRST_BLOCK, Q4_0, Q4_1, FIRST_TILED = 13 };

/* In the order of `dinfer.kernels.cpu.linear.KINDS`; behind them those that lie in tiles. */
static const Kind KINDS[] = {
    {32, 32, 32, 8, 0},
    {32, 16, 32, 4, 0},
    {32, 34, 32, Q8_0_BITS, q8_0},
    {32, 18, 32, 4, q4_0},
    {32, 20, 32, 4, q4_1},
    {32, 22, 32, 5, q5_0},
    {32, 24, 32, 5, q5_1},
    {256, 84, 16, 2, q2_k},
    {256, 110, 16, 3, q3_k},
    {256, 144, 32, 4, q4_k},
    {256, 176, 32, 5, q5_k},
    {256, 210, 16, 6, q6_k},
    {32, 18, 32, 8, iq4_nl},
    {32, 34, 32, Q8_0_BITS, q8_0},
    {32, 18, 32, 4, q4_0},
    {32, 20, 32, 4, q4_1},
};
