/* Sets of states over the active positions of rows, and the choices that they admit (`dinfer.structure.kernels.languages`).

   A set is a byte for each state. Forward sets: the states that a position can be entered in. Backward sets: those from
   which the row can be completed. Functions return 0, or 1 without memory.

   Shapes: B lanes, X active positions, Q states, C classes, P pairs, E edges. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { /* the languages, and the rows */
    const int64_t *place, *meta;
    const int16_t *class, *next, *pair, *edge;
    const int32_t *distance;
    int64_t vocab, distances, lanes, active;
} Rows;

typedef struct { /* one lane's language */
    const int16_t *class, *next, *pair, *edge;
    const int32_t *distance;
    int64_t states, classes, pairs, edges, vocab;
} Language;

static Language language(const Rows *rows, int64_t lane) {
    const int64_t place = rows->place[lane], *meta = rows->meta + 8 * place;
    return (Language){
        rows->class + place * rows->vocab, rows->next + meta[2], rows->pair + 2 * meta[3], rows->edge + 3 * meta[5],
        rows->distance + place * rows->distances, meta[0], meta[1], meta[4], meta[6], rows->vocab};
}

static int64_t class_of(const Language *own, int64_t token) {
    return own->class[token < 0 ? 0 : token >= own->vocab ? own->vocab - 1 : token];
}

static int inside(int64_t state, int64_t states) { return state >= 0 && state < states; }

/* The set on the other side of a position. */
static void step(const Language *own, const uint8_t *from, uint8_t *to, int outside, int opened, int64_t token, int back) {
    const int64_t states = own->states;
    if (outside) {
        memcpy(to, from, states);
        return;
    }
    memset(to, 0, states);
    if (opened) {
        for (int64_t p = 0; p < own->pairs; p++) {
            const int64_t first = own->pair[2 * p], second = own->pair[2 * p + 1];
            if (!inside(first, states) || !inside(second, states)) continue;
            if (back) to[first] |= from[second];
            else to[second] |= from[first];
        }
        return;
    }
    const int16_t *next = own->next + class_of(own, token) * states;
    for (int64_t first = 0; first < states; first++) {
        const int64_t second = next[first];
        if (!inside(second, states)) continue;
        if (back) to[first] = from[second];
        else to[second] |= from[first];
    }
}

static void forward(
    const Language *own, uint8_t *sets, int64_t first, int64_t active, const int64_t *token, const uint8_t *open,
    const uint8_t *outside) {
    for (int64_t x = first; x < active; x++)
        step(own, sets + x * own->states, sets + (x + 1) * own->states, outside[x], open[x], token[x], 0);
}

static void backward(
    const Language *own, uint8_t *sets, int64_t last, const int64_t *token, const uint8_t *open, const uint8_t *outside) {
    for (int64_t x = last; x >= 0; x--)
        step(own, sets + (x + 1) * own->states, sets + x * own->states, outside[x], open[x], token[x], 1);
}

/* The forward sets of a lane, and behind them the backward sets: X + 1 of each, to be freed. NULL without memory. */
static uint8_t *sets_of(
    const Language *own, int64_t active, int64_t state, int64_t room, const int64_t *token, const uint8_t *open,
    const uint8_t *outside) {
    const int64_t size = (active + 1) * own->states;
    uint8_t *enter = malloc(2 * size + 1), *leave = enter + size;
    if (!enter) return NULL;
    memset(enter, 0, own->states);
    if (inside(state, own->states)) enter[state] = 1;
    for (int64_t q = 0; q < own->states; q++) leave[active * own->states + q] = own->distance[q] <= room;
    forward(own, enter, 0, active, token, open, outside);
    backward(own, leave, active - 1, token, open, outside);
    return enter;
}

/* out: [B, X, C], empty at first. */
int dinfer_language_allowed(
    const Rows *rows, const int64_t *token, const uint8_t *open, const uint8_t *outside, const int64_t *state,
    const int64_t *room, uint8_t *out, int64_t most) {
    const int64_t active = rows->active;
    for (int64_t lane = 0; lane < rows->lanes; lane++) {
        const Language own = language(rows, lane);
        const int64_t at = lane * active;
        uint8_t *enter = sets_of(&own, active, state[lane], room[lane], token + at, open + at, outside + at);
        if (!enter) return 1;
        uint8_t *leave = enter + (active + 1) * own.states;
        for (int64_t x = 0; x < active; x++) {
            const uint8_t *from = enter + x * own.states, *to = leave + (x + 1) * own.states;
            uint8_t *classes = out + (at + x) * most;
            for (int64_t e = 0; e < own.edges; e++) {
                const int64_t first = own.edge[3 * e], by = own.edge[3 * e + 1], second = own.edge[3 * e + 2];
                if (inside(first, own.states) && inside(second, own.states) && inside(by, own.classes))
                    classes[by] |= from[first] & to[second];
            }
        }
        free(enter);
    }
    return 0;
}

/* `token` and `open` are written to. `order`: the positions in the order in which they are tried. out: [B, X]. */
int dinfer_language_admitted(
    const Rows *rows, int64_t *token, uint8_t *open, const uint8_t *outside, const int64_t *state, const int64_t *room,
    const uint8_t *commit, const int64_t *choice, const int64_t *order, uint8_t *out) {
    const int64_t active = rows->active;
    for (int64_t lane = 0; lane < rows->lanes; lane++) {
        const Language own = language(rows, lane);
        const int64_t at = lane * active;
        uint8_t *enter = sets_of(&own, active, state[lane], room[lane], token + at, open + at, outside + at);
        if (!enter) return 1;
        uint8_t *leave = enter + (active + 1) * own.states;
        for (int64_t i = 0; i < active; i++) {
            const int64_t x = order[at + i];
            if (!commit[at + x]) continue;
            const int16_t *next = own.next + class_of(&own, choice[at + x]) * own.states;
            int fits = 0;
            for (int64_t q = 0; q < own.states && !fits; q++) {
                const int64_t second = next[q];
                fits = inside(second, own.states) && enter[x * own.states + q] && leave[(x + 1) * own.states + second];
            }
            if (!fits) continue;
            out[at + x] = 1, open[at + x] = 0, token[at + x] = choice[at + x];
            forward(&own, enter, x, active, token + at, open + at, outside + at);
            backward(&own, leave, x, token + at, open + at, outside + at);
        }
        free(enter);
    }
    return 0;
}

int dinfer_language_run(const Rows *rows, const int64_t *state, const int64_t *token, const uint8_t *passed, int64_t *out) {
    for (int64_t lane = 0; lane < rows->lanes; lane++) {
        const Language own = language(rows, lane);
        out[lane] = state[lane];
        for (int64_t x = lane * rows->active; x < (lane + 1) * rows->active; x++) {
            if (!passed[x] || !inside(out[lane], own.states)) continue;
            const int64_t second = own.next[class_of(&own, token[x]) * own.states + out[lane]];
            if (inside(second, own.states)) out[lane] = second;
        }
    }
    return 0;
}
