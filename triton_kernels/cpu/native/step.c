/* A step of a model on a CPU: a list of operations over rows, executed in one call.

   Every operation is divided into pieces, which idle threads take one at a time. A thread that the system does not
   schedule takes no pieces, so the others wait for it only if it was preempted inside a piece. The calling thread takes
   pieces too and can do all the work alone. */
#include "adapters.h"
#include "attention.h"
#include "attention_tiles.h"
#include "experts.h"
#include "products.h"
#include "quantised_rows.h"
#include "random.h"
#include "rows.h"
#include "weights.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* Kinds of operations. An operation is its kind in number[0], then its arguments, which are listed where the kind is
   executed. A view takes three numbers: register, entries between rows, first entry. */
enum { RMS_NORM, LAYER_NORM, PRODUCT, ACTIVATE, ROTATE_AND_APPEND, ATTEND, ADD_LOOKED_UP, ADD, SHRINK, EXPAND_ADD,
       PREPARE, ROUTE, GATHER, PRODUCT_OF_EXPERTS, COMBINE, GATE, CLAMP, LARGEST };
#define OPERATION_NUMBERS 24
#define ROWS_PER_TOKEN (OPERATION_NUMBERS - 1)     /* number of rows of the result for each token; 0: one */

typedef struct {
    int64_t number[OPERATION_NUMBERS];
} Operation;

typedef struct {
    int64_t rows;                     /* tokens of the step */
    char *const *registers;           /* address of each register */
    const Cache *cache;
    const int32_t *positions;         /* [rows] */
    const int64_t *pool_slots;        /* [rows] block * block_tokens + offset */
    const int32_t *query_starts;      /* [sequences + 1] */
    const int32_t *block_tables;      /* [sequences][table_stride] */
    int64_t num_sequences, table_stride;
    int64_t type;
    const Adapters *adapters;         /* NULL: no row has an adapter */
} Step;

/* A piece of attention: query rows of one kv head of one sequence. A single row of a long sequence is split by keys
   into several items, which are its parts of KEYS_PER_PART keys. The thread that finishes the last part merges their
   results. Items of several rows compute the parts one after the other, and merge them in the same order.

   parts          number of parts; 1: not split
   first_partial  index of the result of part 0 in Job.partials, and of the counter in Job.num_finished */
typedef struct {
    int32_t sequence, head, first_row, num_rows, part, parts;
    int64_t first_partial;
} Item;

typedef struct {
    const Step *step;
    const Operation *operations;
    int64_t num_operations;
    Item *items;
    int64_t num_items, tokens_per_item, num_partials;
    Partial *partials;                /* results of parts */
    _Atomic int32_t *num_finished;    /* finished parts, at the index first_partial; 0 between operations */
} Job;

typedef struct {
    char *row;                        /* row 0 */
    int64_t stride;                   /* in entries */
} View;

INLINE View view_at(const Step *step, const int64_t *numbers) {
    return (View){step->registers[numbers[0]] + numbers[2] * bytes_of((int)step->type), numbers[1]};
}

INLINE char *row_at(View view, int64_t row, int type) { return view.row + row * view.stride * bytes_of(type); }

INLINE float as_float(int64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return (float)value;
}

/* Rows of the result of an operation. */
INLINE int64_t rows_of(const Step *step, const int64_t *n) {
    return n[ROWS_PER_TOKEN] ? step->rows * n[ROWS_PER_TOKEN] : step->rows;
}

/* The routing that an operation of experts reads or writes: routing[4..6], experts 11, chosen 12 */
INLINE Routing routing_at(const Step *step, const int64_t *n) {
    return routing_in(view_at(step, n + 4).row, step->rows, n[11], n[12]);
}

#define POINTER(TYPE, NUMBER) ((TYPE)(intptr_t)(NUMBER))

/* ---------------------------------------------------------------- pieces */

#define ENTRIES_PER_PIECE 8192

static int64_t rows_per_piece(int64_t width) { return width >= ENTRIES_PER_PIECE ? 1 : ENTRIES_PER_PIECE / width; }

static int64_t pieces_of_rows(int64_t rows, int64_t width) {
    int64_t each = rows_per_piece(width);
    return (rows + each - 1) / each;
}

/* A piece of a product: outputs of a range of panels for a range of rows. */
typedef struct {
    int64_t first_panel, end_panel, first_row, end_row;
} ProductPiece;

/* Maximum number of rows of a piece: a multiple of MAX_ROWS. More pieces balance the threads. With fewer rows, a piece
   can have more panels, and its rows are widened once for all of them. */
#define ROWS_PER_PIECE 96
#define ALL_ROWS (1 << 30)

static int64_t max_rows_per_piece(const Operation *o, const Matrix *m) {
    if (o->number[0] == LARGEST) return ALL_ROWS;                              /* its results are per piece and row */
    return m->type == BFLOAT16 && may_use_tiles() ? ALL_ROWS : ROWS_PER_PIECE; /* tiles read the panels once */
}

static int64_t groups_of_rows(const Operation *o, const Matrix *m, int64_t rows) {
    int64_t each = max_rows_per_piece(o, m);
    return (rows + each - 1) / each;
}

static int64_t panels_per_piece(const Matrix *m, int64_t groups, int threads) {
    int64_t panels = num_panels(m);
    for (int64_t each = MAX_PANELS_PER_PIECE; each > 1; each /= 2)
        if (panels / each * groups >= 8 * threads) return each;
    return panels >= 8 ? 2 : 1;
}

static ProductPiece piece_of_product(const Operation *o, const Matrix *m, int64_t rows, int64_t piece, int threads) {
    int64_t groups = groups_of_rows(o, m, rows), each = panels_per_piece(m, groups, threads), panels = num_panels(m);
    int64_t panel = piece / groups * each, row = piece % groups * max_rows_per_piece(o, m);
    int64_t end_panel = panel + each, end_row = row + max_rows_per_piece(o, m);
    return (ProductPiece){panel, end_panel < panels ? end_panel : panels, row, end_row < rows ? end_row : rows};
}

/* Pieces of PRODUCT_OF_EXPERTS: panels of one of the experts that can have rows at most. */
static int64_t experts_with_rows(const Step *s, const int64_t *n) {
    return s->rows * n[12] < n[11] ? s->rows * n[12] : n[11];
}

static int64_t panels_per_piece_of_expert(const Step *s, const int64_t *n, int threads) {
    return panels_per_piece(*POINTER(const Matrix *const *, n[10]), experts_with_rows(s, n), threads);
}

static int64_t pieces_per_expert(const Step *s, const int64_t *n, int threads) {
    int64_t each = panels_per_piece_of_expert(s, n, threads);
    return (num_panels(*POINTER(const Matrix *const *, n[10])) + each - 1) / each;
}

/* Entries per row that a rowwise operation processes. */
static int64_t width_of(const Operation *o) {
    const int64_t *n = o->number;
    switch (n[0]) {
    case RMS_NORM: case LAYER_NORM: return n[7] * n[8];
    case ACTIVATE: return 2 * n[7];
    case ROTATE_AND_APPEND: return 4096;
    case ADD: case GATHER: case GATE: return n[10];
    case COMBINE: return n[10] * n[12];
    default: return n[7];
    }
}

/* Pieces for each tile of adapters of SHRINK or EXPAND_ADD; 0 if no adapter of the step changes the projections. */
static int64_t pieces_per_tile(const Adapters *a, const Operation *o) {
    const int64_t *n = o->number;
    int64_t count = n[8], pieces = 0;
    int has_work = 0;
    for (int64_t tile = 0; tile < a->num_tiles && !has_work; tile++)
        for (int64_t i = 0; i < count; i++) has_work |= a->tiles[tile].ranks[n[9 + i]] > 0;
    if (!has_work) return 0;
    if (n[0] == SHRINK) return count * ((a->most_ranks + RANKS_PER_PIECE - 1) / RANKS_PER_PIECE);
    for (int64_t i = 0; i < count; i++) pieces += (n[18 + i] + ADDED_PER_PIECE - 1) / ADDED_PER_PIECE;
    return pieces;
}

static int64_t count_pieces(const Job *job, const Operation *o, int threads) {
    switch (o->number[0]) {
    case PRODUCT: case LARGEST: {
        const Matrix *m = POINTER(const Matrix *, o->number[7]);
        int64_t groups = groups_of_rows(o, m, job->step->rows), each = panels_per_piece(m, groups, threads);
        return (num_panels(m) + each - 1) / each * groups;
    }
    case ATTEND: return job->num_items;
    case SHRINK: case EXPAND_ADD:
        return job->step->adapters ? pieces_per_tile(job->step->adapters, o) * job->step->adapters->num_tiles : 0;
    case ROUTE: return 1;
    case PRODUCT_OF_EXPERTS:
        return experts_with_rows(job->step, o->number) * pieces_per_expert(job->step, o->number, threads);
    default: return pieces_of_rows(rows_of(job->step, o->number), width_of(o));
    }
}

/* ---------------------------------------------------------------- operations */

static void norm_rows(const Step *s, const int64_t *n, int64_t first, int64_t end, int type) {
    /* from[1..3], to[4..6], size 7, heads 8 (adjacent), weight 9, bias 10, epsilon 11, offset 12, entries between the
       weights of two heads 13 (0: shared) */
    View from = view_at(s, n + 1), to = view_at(s, n + 4);
    for (int64_t row = first; row < end; row++)
        for (int64_t head = 0; head < n[8]; head++) {
            const char *x = row_at(from, row, type) + head * n[7] * bytes_of(type);
            char *y = row_at(to, row, type) + head * n[7] * bytes_of(type);
            const float *weight = POINTER(const float *, n[9]) + head * n[13];
            if (n[0] == RMS_NORM)
                rms_norm_of(x, y, weight, n[7], as_float(n[11]), as_float(n[12]), type);
            else
                layer_norm_of(x, y, weight, POINTER(const float *, n[10]), n[7],
                              as_float(n[11]), type);
        }
}

static void rotate_and_append_rows(const Step *s, const int64_t *n, int64_t first, int64_t end, int type) {
    /* query[1..3], key[4..6], value[7..9], layer 10, cosines 11, sines 12, half 13 (0: no rotation), scales of keys 14
       and values 15 in FP8 */
    View query = view_at(s, n + 1), key = view_at(s, n + 4), value = view_at(s, n + 7);
    const Cache *c = s->cache;
    int64_t size = c->head_size, width = size * bytes_of(type), half = n[13], stored = size * bytes_of(c->type);
    char turned[MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    for (int64_t row = first; row < end; row++) {
        const float *cosines = POINTER(const float *, n[11]) + s->positions[row] * half;
        const float *sines = POINTER(const float *, n[12]) + s->positions[row] * half;
        if (half)
            for (int64_t head = 0; head < c->query_heads; head++) {
                char *q = row_at(query, row, type) + head * width;
                rotate(q, q, cosines, sines, half, size, type);
            }
        int64_t block = s->pool_slots[row] / c->block_tokens, offset = s->pool_slots[row] % c->block_tokens;
        for (int64_t head = 0; head < c->kv_heads; head++) {
            char *k = (char *)page_of(c, block, n[10], 0, head) + offset * stored;
            char *v = (char *)page_of(c, block, n[10], 1, head) + offset * stored;
            const char *from = row_at(key, row, type) + head * width, *values = row_at(value, row, type) + head * width;
            if (half) {
                rotate(from, turned, cosines, sines, half, size, type);
                from = turned;
            }
            if (c->type == FP8) {
                narrow_row_to_fp8(from, (uint8_t *)k, size, as_float(n[14]), type);
                narrow_row_to_fp8(values, (uint8_t *)v, size, as_float(n[15]), type);
            } else {
                memcpy(k, from, width);
                memcpy(v, values, width);
            }
        }
    }
}

/* One function, so that rows get the same code wherever it is called. */
__attribute__((noinline))
static void attend_to_part(const Cache *c, const Scores *how, Task *task, int64_t part, Partial *partial, int type) {
    task->first_key = part * KEYS_PER_PART;
    task->end_key = task->first_key + KEYS_PER_PART;
#if defined(HAS_ATTENTION_TILES)
    if (fits_tiles(c, type)) {
        attend_in_tiles(c, how, task, partial);
        return;
    }
#endif
    if (type == FLOAT32) attend(c, how, task, partial, FLOAT32);
    else attend(c, how, task, partial, BFLOAT16);
}

static void attend_item(const Job *job, const int64_t *n, const Item *item, const Item *next, int type) {
    /* query[1..3], to[4..6], layer 7, scale 8, softcap 9, window 10, sinks 11, slopes 12, factor 13, sink logits 14, scale
       of values in FP8 15 */
    const Step *s = job->step;
    const Cache *c = s->cache;
    View query = view_at(s, n + 1), to = view_at(s, n + 4);
    int64_t size = c->head_size, width = size * bytes_of(type), group = c->query_heads / c->kv_heads;
    int query_type = type_of_queries(type);
    char queries[MAX_QUERY_ROWS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    int64_t position[MAX_QUERY_ROWS];
    float slopes[MAX_QUERY_ROWS];
    Partial here, other, *partial = item->parts > 1 ? job->partials + item->first_partial + item->part : &here;
    Scores how = {as_float(n[8]), as_float(n[9]), n[10], n[11], POINTER(const float *, n[12]), as_float(n[13]),
                  POINTER(const float *, n[14])};
    Task task = {n[7], item->head, s->block_tables + item->sequence * s->table_stride, queries, position, slopes, 0,
                 item->part * KEYS_PER_PART, 0,
                 page_of(c, s->block_tables[next->sequence * s->table_stride
                                            + next->part * KEYS_PER_PART / c->block_tokens], n[7], 0, next->head)};
    for (int64_t at = 0; at < group; at += MAX_QUERY_ROWS) {         /* more than once only for very large groups */
        int64_t heads = group - at < MAX_QUERY_ROWS ? group - at : MAX_QUERY_ROWS, count = 0;
        for (int64_t row = item->first_row; row < item->first_row + item->num_rows; row++)
            for (int64_t g = 0; g < heads; g++, count++) {
                int64_t query_head = item->head * group + at + g;
                const char *from = row_at(query, row, type) + query_head * width;
                char *packed = queries + count * size * bytes_of(query_type);
                if (query_type == type) memcpy(packed, from, width);
                else for (int64_t i = 0; i < size; i++) ((float *)packed)[i] = load_one(from, i, type);
                position[count] = s->positions[row];
                if (how.slopes) slopes[count] = how.slopes[query_head];
            }
        task.rows = (int)count;
        attend_to_part(c, &how, &task, item->part, partial, type);
        if (item->parts == 1)
            for (int64_t part = 1; part * KEYS_PER_PART <= position[count - 1]; part++) {
                attend_to_part(c, &how, &task, part, &other, type);
                merge_partial(partial, &other, task.rows, size);
            }
        else {
            _Atomic int32_t *finished = job->num_finished + item->first_partial;
            if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) + 1 < item->parts) return;
            atomic_store_explicit(finished, 0, memory_order_relaxed);
            partial = job->partials + item->first_partial;
            for (int part = 1; part < item->parts; part++) merge_partial(partial, partial + part, task.rows, size);
        }
        count = 0;
        for (int64_t row = item->first_row; row < item->first_row + item->num_rows; row++)
            for (int64_t g = 0; g < heads; g++, count++) {
                char *y = row_at(to, row, type) + (item->head * group + at + g) * width;
                const float *from = partial->sums[count];
                float total = partial->total[count], shrink = as_float(n[15]);
                if (how.sink_logits) {
                    float logit = how.sink_logits[item->head * group + at + g], most = partial->maximum[count];
                    float top = logit > most ? logit : most;
                    float less = exponential(all(most - top))[0];
                    total = total * less + exponential(all(logit - top))[0];
                    shrink *= less;
                }
                int64_t i = 0;
                for (; i + LANES <= size; i += LANES) store(y, i, *(const floats *)(from + i) * shrink / total, type);
                for (; i < size; i++) store_one(y, i, from[i] * shrink / total, type);
            }
    }
}

static void run_adapters(const Job *job, const Operation *o, int64_t piece, int type) {
    /* SHRINK: from[1..3]; EXPAND_ADD: to[1..3]; inputs 7, number of projections 8, their indices 9..11, entries of A or
       B in a page 12..14; SHRINK: entries of B 15..17; EXPAND_ADD: first outputs 15..17, outputs 18..20 */
    const Adapters *a = job->step->adapters;
    const int64_t *n = o->number;
    int64_t each = pieces_per_tile(a, o), rest = piece % each, i = 0;
    const AdapterTile *t = a->tiles + piece / each;
    int64_t stride = PROJECTIONS_AT_ONCE * a->most_ranks;
    View view = view_at(job->step, n + 1);
    if (n[0] == SHRINK) {
        i = rest % n[8];
        int64_t first = rest / n[8] * RANKS_PER_PIECE, end = first + RANKS_PER_PIECE, ranks = t->ranks[n[9 + i]];
        if (end > ranks) end = ranks;
        shrink(a, t, view.row, view.stride, n[12 + i], n[7], first, end, a->shrunk + i * a->most_ranks, stride,
               n[15 + i], type);
        return;
    }
    for (int64_t pieces; rest >= (pieces = (n[18 + i] + ADDED_PER_PIECE - 1) / ADDED_PER_PIECE); i++) rest -= pieces;
    int64_t first = rest * ADDED_PER_PIECE, left = n[18 + i] - first, ranks = t->ranks[n[9 + i]];
    if (ranks)
        expand_add(a, t, a->shrunk + i * a->most_ranks, stride, ranks, n[12 + i],
                   view.row + n[15 + i] * bytes_of(type), view.stride, first,
                   left < ADDED_PER_PIECE ? left : ADDED_PER_PIECE, type);
}

static void run_rows(const Job *job, const int64_t *n, int64_t first, int64_t end, int type) {
    const Step *s = job->step;
    switch (n[0]) {
    case RMS_NORM: case LAYER_NORM:
        norm_rows(s, n, first, end, type);
        break;
    case ACTIVATE: {
        /* from[1..3], to[4..6], size 7, kind 8, gated 9 */
        View from = view_at(s, n + 1), to = view_at(s, n + 4);
        for (int64_t row = first; row < end; row++)
            activate_row(row_at(from, row, type), row_at(to, row, type), n[7], (int)n[8], (int)n[9], type);
        break;
    }
    case PREPARE: {
        /* from[1..3], to[4..6], size 7, whether in bytes 8 */
        View from = view_at(s, n + 1), to = view_at(s, n + 4);
        for (int64_t row = first; row < end; row++)
            prepare_row(row_at(from, row, type), row_at(to, row, type), n[7], (int)n[8], type);
        break;
    }
    case GATHER: {
        /* from[1..3], routing[4..6], to[7..9], size 10, experts 11, chosen 12 */
        View from = view_at(s, n + 1), to = view_at(s, n + 7);
        Routing r = routing_at(s, n);
        for (int64_t place = first; place < end; place++)
            memcpy(row_at(to, place, type), row_at(from, r.row_of[place], type), (size_t)(n[10] * bytes_of(type)));
        break;
    }
    case COMBINE: {
        /* from[1..3], routing[4..6], to[7..9], size 10, experts 11, chosen 12, whether to add 13 */
        View from = view_at(s, n + 1), to = view_at(s, n + 7);
        Routing r = routing_at(s, n);
        for (int64_t row = first; row < end; row++)
            combine_row(&r, row, n[12], from.row, from.stride, row_at(to, row, type), n[10], (int)n[13], type);
        break;
    }
    case GATE: {
        /* from[1..3], gate[4..6] of one entry, to[7..9], size 10 */
        View from = view_at(s, n + 1), gate = view_at(s, n + 4), to = view_at(s, n + 7);
        for (int64_t row = first; row < end; row++) {
            float factor = 1.0f / (1.0f + exponential(all(-load_one(row_at(gate, row, type), 0, type)))[0]);
            scale_row(row_at(from, row, type), row_at(to, row, type), n[10], factor, type);
        }
        break;
    }
    case CLAMP: {
        /* from[1..3], to[4..6], size 7, bound 8 */
        View from = view_at(s, n + 1), to = view_at(s, n + 4);
        for (int64_t row = first; row < end; row++)
            clamp_row(row_at(from, row, type), row_at(to, row, type), n[7], as_float(n[8]), type);
        break;
    }
    case ROTATE_AND_APPEND:
        rotate_and_append_rows(s, n, first, end, type);
        break;
    case ADD_LOOKED_UP: case ADD: {
        /* from[1..3], to[4..6]; ADD: other[7..9], size 10; ADD_LOOKED_UP: size 7, table 8 with a row per position */
        View from = view_at(s, n + 1), to = view_at(s, n + 4);
        int64_t size = n[0] == ADD ? n[10] : n[7];
        for (int64_t row = first; row < end; row++) {
            char *y = row_at(to, row, type);
            const char *x = row_at(from, row, type);
            const char *other = n[0] == ADD ? row_at(view_at(s, n + 7), row, type)
                                            : POINTER(const char *, n[8]) + s->positions[row] * size * bytes_of(type);
            int64_t i = 0;
            for (; i + LANES <= size; i += LANES) store(y, i, load(x, i, type) + load(other, i, type), type);
            for (; i < size; i++) store_one(y, i, load_one(x, i, type) + load_one(other, i, type), type);
        }
        break;
    }
    }
}

static void run_piece(const Job *job, const Operation *o, int64_t piece, int threads) {
    const int64_t *n = o->number;
    const Step *s = job->step;
    switch (n[0]) {
    case PRODUCT: {
        /* from[1..3], to[4..6], matrix 7, whether to add 8, type of the result 9 */
        const Matrix *m = POINTER(const Matrix *, n[7]);
        View from = view_at(s, n + 1);
        int result = (int)n[9];
        ProductPiece p = piece_of_product(o, m, s->rows, piece, threads);
        Target t = {s->registers[n[4]] + (n[6] + p.first_row * n[5]) * bytes_of(result), n[5], result, (int)n[8]};
        multiply(m, row_at(from, p.first_row, m->type), from.stride, p.end_row - p.first_row, &t,
                 p.first_panel, p.end_panel);
        break;
    }
    case LARGEST: {
        /* from[1..3], matrix 7; results for each piece and row: the largest outputs 8, their indices 9 */
        const Matrix *m = POINTER(const Matrix *, n[7]);
        View from = view_at(s, n + 1);
        ProductPiece p = piece_of_product(o, m, s->rows, piece, threads);
        largest_outputs(m, from.row, from.stride, s->rows, p.first_panel, p.end_panel,
                        POINTER(float *, n[8]) + piece * s->rows, POINTER(int64_t *, n[9]) + piece * s->rows);
        break;
    }
    case ROUTE: {
        /* logits[1..3], routing[4..6], whether weights are renormalised 7, experts 11, chosen 12 */
        View from = view_at(s, n + 1);
        Routing r = routing_at(s, n);
        route(&r, from.row, from.stride, s->rows, n[11], n[12], (int)n[7], (int)s->type);
        break;
    }
    case PRODUCT_OF_EXPERTS: {
        /* from[1..3], routing[4..6], to[7..9], a matrix for each expert 10, experts 11, chosen 12 */
        View from = view_at(s, n + 1), to = view_at(s, n + 7);
        Routing r = routing_at(s, n);
        int64_t each = panels_per_piece_of_expert(s, n, threads), pieces = pieces_per_expert(s, n, threads);
        int64_t active = piece / pieces, first_panel = piece % pieces * each, end_panel = first_panel + each;
        if (active >= *r.num_active) break;
        const Matrix *m = POINTER(const Matrix *const *, n[10])[r.expert_of[active]];
        int64_t first = r.first_of[active];
        Target t = {row_at(to, first, (int)s->type), to.stride, (int)s->type, 0};
        multiply(m, row_at(from, first, m->type), from.stride, r.first_of[active + 1] - first, &t, first_panel,
                 end_panel < num_panels(m) ? end_panel : num_panels(m));
        break;
    }
    case ATTEND:
        attend_item(job, n, job->items + piece,
                    job->items + (piece + threads < job->num_items ? piece + threads : piece), (int)s->type);
        break;
    case SHRINK: case EXPAND_ADD:
        if (s->type == FLOAT32) run_adapters(job, o, piece, FLOAT32);
        else run_adapters(job, o, piece, BFLOAT16);
        break;
    default: {
        int64_t each = rows_per_piece(width_of(o)), first = piece * each, end = first + each;
        if (end > rows_of(s, n)) end = rows_of(s, n);
        if (s->type == FLOAT32) run_rows(job, n, first, end, FLOAT32);
        else run_rows(job, n, first, end, BFLOAT16);
    }
    }
}

/* ---------------------------------------------------------------- threads */

/* The state is one number that contains the job, its current operation, and the number of pieces of this operation that
   are taken. A thread that slept through the end of a job therefore cannot take a piece of the next job. */
#define PIECE_BITS 24
#define OPERATION_BITS 20
#define STATE(JOB, OPERATION, PIECES) \
    (((uint64_t)(JOB) << (PIECE_BITS + OPERATION_BITS)) | ((uint64_t)(OPERATION) << PIECE_BITS) | (uint64_t)(PIECES))
#define PIECES(STATE) ((int64_t)((STATE) & ((1ull << PIECE_BITS) - 1)))
#define OPERATION(STATE) ((uint64_t)(((STATE) >> PIECE_BITS) & ((1ull << OPERATION_BITS) - 1)))
#define JOB(STATE) ((uint64_t)((STATE) >> (PIECE_BITS + OPERATION_BITS)))

#define NO_OPERATION ((1ull << OPERATION_BITS) - 1)
#define MAX_OPERATIONS (1 << 14)
#define MAX_THREADS 256
#define SPINS_BEFORE_SLEEP 1000       /* 15 to 50 us: long enough for the next call in a step, not for the next step */
#define SPINS_BEFORE_YIELD 1000

static struct {
    pthread_mutex_t owner;            /* held by the caller that uses the pool; other callers work alone */
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_t helpers[MAX_THREADS];
    int num_helpers, num_asleep;
    _Atomic int is_stopping;
    _Atomic uint64_t state;
    _Atomic int64_t num_done;
    _Atomic int threads;
    _Atomic int64_t processor_ns;     /* of all threads in jobs, since the library was loaded */
    Job job;
    _Atomic int64_t num_pieces[MAX_OPERATIONS];
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

INLINE void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE int64_t num_pieces(int64_t operation) {
    return atomic_load_explicit(&pool.num_pieces[operation], memory_order_relaxed);
}

/* Return the first operation from this one on that has pieces. */
static uint64_t next_operation(int64_t operation) {
    while (operation < pool.job.num_operations && num_pieces(operation) == 0) operation++;
    return operation < pool.job.num_operations ? (uint64_t)operation : NO_OPERATION;
}

static int64_t processor_time_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static void take_pieces(uint64_t number, int threads) {
    int spins = 0;
    for (;;) {
        uint64_t seen = atomic_load_explicit(&pool.state, memory_order_acquire), operation = OPERATION(seen);
        if (JOB(seen) != number || operation == NO_OPERATION) return;
        if (PIECES(seen) >= num_pieces((int64_t)operation)) {        /* wait until other threads finish it */
            pause_a_moment();
            if (++spins > SPINS_BEFORE_YIELD) sched_yield();
            continue;
        }
        if (!atomic_compare_exchange_weak_explicit(&pool.state, &seen, seen + 1, memory_order_acq_rel,
                                                   memory_order_acquire)) continue;
        spins = 0;
        run_piece(&pool.job, pool.job.operations + operation, PIECES(seen), threads);
        int64_t count = num_pieces((int64_t)operation);
        if (atomic_fetch_add_explicit(&pool.num_done, 1, memory_order_acq_rel) + 1 == count) {
            atomic_store_explicit(&pool.num_done, 0, memory_order_relaxed);
            atomic_store_explicit(&pool.state, STATE(number, next_operation((int64_t)operation + 1), 0),
                                  memory_order_release);
        }
    }
}

/* Take pieces until the job with this number ends. */
static void work_on(uint64_t number, int threads) {
    int64_t start = processor_time_ns();
    take_pieces(number, threads);
    atomic_fetch_add_explicit(&pool.processor_ns, processor_time_ns() - start, memory_order_relaxed);
}

INLINE int has_work(uint64_t state, uint64_t done, int index) {
    return JOB(state) != done && OPERATION(state) != NO_OPERATION
           && index < atomic_load_explicit(&pool.threads, memory_order_relaxed);
}

static void *helper_main(void *argument) {
    int index = (int)(intptr_t)argument, spins = 0;
    uint64_t done = 0;
    while (!atomic_load_explicit(&pool.is_stopping, memory_order_relaxed)) {
        uint64_t seen = atomic_load_explicit(&pool.state, memory_order_acquire);
        if (has_work(seen, done, index)) {
            work_on(JOB(seen), atomic_load_explicit(&pool.threads, memory_order_relaxed));
            done = JOB(seen);
            spins = 0;
        } else if (++spins < SPINS_BEFORE_SLEEP) {
            pause_a_moment();
        } else {
            pthread_mutex_lock(&pool.lock);
            if (!has_work(atomic_load(&pool.state), done, index) && !atomic_load(&pool.is_stopping)) {
                pool.num_asleep++;
                pthread_cond_wait(&pool.work, &pool.lock);
                pool.num_asleep--;
            }
            pthread_mutex_unlock(&pool.lock);
            spins = 0;
        }
    }
    return 0;
}

/* Reset the pool in a forked child, which has no helpers. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.owner, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.work, 0);
    pool.num_helpers = pool.num_asleep = 0;
    atomic_store(&pool.is_stopping, 0);
}

/* Start helpers, up to threads - 1. Fewer if the system refuses more threads. */
static void start_helpers(int threads) {
    static int is_watching_forks;
    if (!is_watching_forks) is_watching_forks = !pthread_atfork(0, 0, forget_helpers);
    while (pool.num_helpers < threads - 1 && pool.num_helpers < MAX_THREADS) {
        void *index = (void *)(intptr_t)(pool.num_helpers + 1);
        if (pthread_create(pool.helpers + pool.num_helpers, 0, helper_main, index)) break;
        pool.num_helpers++;
    }
}

static void run_alone(const Job *job) {
    int64_t start = processor_time_ns();
    for (int64_t i = 0; i < job->num_operations; i++) {
        int64_t count = count_pieces(job, job->operations + i, 1);
        for (int64_t piece = 0; piece < count; piece++) run_piece(job, job->operations + i, piece, 1);
    }
    atomic_fetch_add_explicit(&pool.processor_ns, processor_time_ns() - start, memory_order_relaxed);
}

/* ---------------------------------------------------------------- called from Python */

/* Fill `items` with the items of a step and set num_items and num_partials. If `items` is 0, only count. */
static void list_items(Job *job, Item *items) {
    const Step *s = job->step;
    int64_t group = s->cache->query_heads / s->cache->kv_heads, count = 0, partials = 0;
    for (int64_t sequence = 0; sequence < s->num_sequences; sequence++) {
        int64_t start = s->query_starts[sequence], end = s->query_starts[sequence + 1], parts = 1;
        if (end - start == 1 && group <= MAX_QUERY_ROWS) parts = s->positions[start] / KEYS_PER_PART + 1;
        for (int64_t row = end; row > start; row -= job->tokens_per_item) {        /* the longest first */
            int64_t first = row - job->tokens_per_item > start ? row - job->tokens_per_item : start;
            for (int64_t head = 0; head < s->cache->kv_heads; head++) {
                for (int64_t part = 0; part < parts; part++, count++)
                    if (items)
                        items[count] = (Item){(int32_t)sequence, (int32_t)head, (int32_t)first, (int32_t)(row - first),
                                              (int32_t)part, (int32_t)parts, partials};
                if (parts > 1) partials += parts;
            }
        }
    }
    job->num_items = count;
    job->num_partials = partials;
}

/* Allocate and fill the lists of a job. Returns 0 if there is not enough memory. */
static int make_lists(Job *job) {
    const Cache *c = job->step->cache;
    int64_t group = c->query_heads / c->kv_heads;
    job->tokens_per_item = group >= MAX_QUERY_ROWS ? 1 : MAX_QUERY_ROWS / group;
    list_items(job, 0);
    job->items = malloc((size_t)job->num_items * sizeof(Item) + 1);
    job->partials = aligned_alloc(64, (size_t)(job->num_partials + 1) * sizeof(Partial));
    job->num_finished = calloc((size_t)job->num_partials + 1, sizeof *job->num_finished);
    if (!job->items || !job->partials || !job->num_finished) return 0;
    list_items(job, job->items);
    return 1;
}

static void free_lists(Job *job) {
    free(job->items);
    free(job->partials);
    free(job->num_finished);
}

/* Run the operations. Returns 0, or 1 without computing anything if there is not enough memory. */
int run_step(const Step *step, const Operation *operations, int64_t num_operations, int threads) {
    Job job = {.step = step, .operations = operations, .num_operations = num_operations};
    if (step->cache && !make_lists(&job)) {
        free_lists(&job);
        return 1;
    }
    if (threads < 2 || num_operations > MAX_OPERATIONS || pthread_mutex_trylock(&pool.owner)) {
        run_alone(&job);
    } else {
        uint64_t number = (JOB(atomic_load(&pool.state)) + 1) & JOB(~0ull);
        start_helpers(threads);
        atomic_store(&pool.state, STATE(number, NO_OPERATION, 0));   /* no pieces to take while the job is set up */
        pool.job = job;
        for (int64_t i = 0; i < num_operations; i++) pool.num_pieces[i] = count_pieces(&job, operations + i, threads);
        atomic_store(&pool.threads, threads);
        atomic_store(&pool.num_done, 0);
        atomic_store(&pool.state, STATE(number, next_operation(0), 0));
        pthread_mutex_lock(&pool.lock);
        if (pool.num_asleep) pthread_cond_broadcast(&pool.work);
        pthread_mutex_unlock(&pool.lock);
        work_on(number, threads);
        pthread_mutex_unlock(&pool.owner);
    }
    free_lists(&job);
    return 0;
}

/* Stop the helpers after the current job. The next job starts new ones. */
void stop_helpers(void) {
    pthread_mutex_lock(&pool.owner);
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.is_stopping, 1);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < pool.num_helpers; i++) pthread_join(pool.helpers[i], 0);
    pool.num_helpers = 0;
    atomic_store(&pool.is_stopping, 0);
    pthread_mutex_unlock(&pool.owner);
}

/* Return the processor time of all threads in jobs so far. A thread adds its time when it leaves a job, which can be
   shortly after the job has ended. */
int64_t processor_nanoseconds(void) { return atomic_load_explicit(&pool.processor_ns, memory_order_relaxed); }

/* Find the largest output of each row of x and its index. Ties: the lowest index. The result of a row is NaN if any of
   its outputs is NaN. Returns 0, or 1 if there is not enough memory. */
int largest_outputs_of(const Matrix *matrix, const void *x, int64_t stride, int64_t rows, int64_t *index_of,
                       float *largest_of, int threads) {
    char *const registers[1] = {(char *)x};
    Step step = {.rows = rows, .registers = registers, .type = matrix->type};
    Operation operation = {{LARGEST, 0, stride, 0}};
    Job job = {.step = &step};
    operation.number[7] = (int64_t)(intptr_t)matrix;
    int64_t pieces = count_pieces(&job, &operation, threads), alone = count_pieces(&job, &operation, 1);
    if (alone > pieces) pieces = alone;
    float *largest = malloc((size_t)(pieces * rows) * sizeof(float));
    int64_t *index = malloc((size_t)(pieces * rows) * sizeof(int64_t));
    int has_memory = largest && index;
    if (has_memory) {
        for (int64_t i = 0; i < pieces * rows; i++) largest[i] = -INFINITY;      /* for pieces that are not run */
        operation.number[8] = (int64_t)(intptr_t)largest;
        operation.number[9] = (int64_t)(intptr_t)index;
        run_step(&step, &operation, 1, threads);
        for (int64_t row = 0; row < rows; row++) {
            float top = largest[row];
            int64_t where = index[row];
            for (int64_t piece = 1; piece < pieces; piece++) {
                float other = largest[piece * rows + row];
                if (!(other <= top) && top == top) top = other, where = index[piece * rows + row];
            }
            largest_of[row] = top;
            index_of[row] = where;
        }
    }
    free(largest);
    free(index);
    return !has_memory;
}

void pack_matrix(const Matrix *matrix, const void *plain, int64_t plain_inputs, int64_t row_stride) {
    pack(matrix, plain, plain_inputs, row_stride, 0, num_panels(matrix));
}

void philox_words(const uint64_t *seeds, const int32_t *positions, const uint32_t *purposes, const uint32_t *quarters,
                  int64_t quarter_stride, int64_t rows, int64_t counters, uint32_t *words) {
    random_words(seeds, positions, purposes, quarters, quarter_stride, rows, counters, words);
}

void weights_of_rows(const float *logits, int64_t stride, int64_t rows, int64_t count, const float *inverse,
                     const float *maxima, const float *floors, float *weights, float *sums, double *totals) {
    weigh_rows(logits, stride, rows, count, inverse, maxima, floors, weights, sums, totals);
}
