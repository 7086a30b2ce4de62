/* All layers of a dense transformer in one call: what takes Python some forty calls a layer, by the functions that those
   calls end in, in their order, so that no result changes.

   Shapes: R = B * W rows, D hidden, H query heads, G key heads, E head size, M width of the MLP. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int dinfer_linear(const float *x, int64_t R, int64_t K, const int64_t *first, int64_t segments, const void *parts,
                  int64_t count, float *out, int64_t O, int64_t threads);
int dinfer_low_rank(const float *x, const uint8_t *open, const uint16_t *a, const uint16_t *b, const int32_t *first, float *y,
                    int64_t R, int64_t K, int64_t S, int64_t P, int64_t ranks, int64_t piece, int64_t threads);
int dinfer_attention(const float *q, const float *k, const float *v, const int64_t *pages, const int64_t *from,
                     const int64_t *to, float *out, int64_t B, int64_t W, int64_t H, int64_t G, int64_t E, int64_t P, int64_t T,
                     int64_t threads);
int dinfer_add_rms_norm(const float *x, const float *delta, const float *weight, float *sum, float *out, int64_t R, int64_t D,
                        float eps, int64_t threads);
int dinfer_swiglu(const float *x, float *out, int64_t R, int64_t M, int64_t threads);
int dinfer_rotate_and_store(const float *x, const float *cosine, const float *sine, const float *weight, const int64_t *write,
                            float *q, float *k, float *v, int64_t R, int64_t H, int64_t G, int64_t E, int64_t D, float eps,
                            int64_t threads);

/* A linear map, and what its rows with an open gate add (`a` of 0: nothing). `dinfer.kernels.cpu.layers` fills it. */
typedef struct {
    const void *parts;
    int64_t count, inputs, outputs;
    const float *bias;
    const uint16_t *a, *b;
    const int32_t *first;
    int64_t low, pieces, ranks, piece;
} Map;

typedef struct {
    const float *attention_norm, *head_norm, *mlp_norm;
    Map qkv, out, gate_up, down;
} Layer;

typedef struct { /* sizes of a forward, and where its keys are */
    int64_t layers, lanes, width, hidden, heads, kv_heads, size, turned, mlp, pages, page, threads;
    float *k, *v;
    int64_t stride; /* of a layer's keys, in floats */
} Sizes;

static int map(const Map *own, const float *x, const uint8_t *open, float *y, int64_t R, int64_t threads) {
    int64_t all[2] = {0, R};
    if (dinfer_linear(x, R, own->inputs, all, 1, own->parts, own->count, y, own->outputs, threads)) return 1;
    for (int64_t r = 0; own->bias && r < R; r++)
        for (int64_t o = 0; o < own->outputs; o++) y[r * own->outputs + o] += own->bias[o];
    if (!open || !own->a) return 0;
    return dinfer_low_rank(x, open, own->a, own->b, own->first, y, R, own->inputs, own->low, own->pieces, own->ranks, own->piece,
                           threads);
}

/* x[R, D] becomes the residual stream behind the last layer. `open`[R]: rows that take low-rank parts; 0: none does.
   Returns 0, or 1 without memory. */
int dinfer_layers(const Layer *layer, const Sizes *size, float *x, const float *cosine, const float *sine, const int64_t *write,
                  const int64_t *pages, const int64_t *from, const int64_t *to, const uint8_t *open, float eps) {
    const int64_t R = size->lanes * size->width, D = size->hidden, H = size->heads, G = size->kv_heads, E = size->size;
    const int64_t M = size->mlp, T = size->threads, most = (H + 2 * G) * E > 2 * M ? (H + 2 * G) * E : 2 * M;
    float *wide = malloc(R * (most + (H * E > M ? H * E : M) + H * E + 2 * D) * sizeof *wide), *inner = wide + R * most;
    float *seen = inner + R * (H * E > M ? H * E : M), *normed = seen + R * H * E, *delta = normed + R * D;
    int failed = !wide;
    for (int64_t i = 0; !failed && i < size->layers; i++, layer++) {
        float *k = size->k + i * size->stride, *v = size->v + i * size->stride;
        failed = dinfer_add_rms_norm(x, i ? delta : 0, layer->attention_norm, x, normed, R, D, eps, T)
            || map(&layer->qkv, normed, open, wide, R, T)
            || dinfer_rotate_and_store(wide, cosine, sine, layer->head_norm, write, inner, k, v, R, H, G, E, size->turned, eps, T)
            || dinfer_attention(inner, k, v, pages, from, to, seen, size->lanes, size->width, H, G, E, size->pages, size->page, T)
            || map(&layer->out, seen, open, delta, R, T)
            || dinfer_add_rms_norm(x, delta, layer->mlp_norm, x, normed, R, D, eps, T)
            || map(&layer->gate_up, normed, open, wide, R, T) || dinfer_swiglu(wide, inner, R, M, T)
            || map(&layer->down, inner, open, delta, R, T);
    }
    for (int64_t i = 0; !failed && i < R * D; i++) x[i] += delta[i];
    free(wide);
    return failed;
}
