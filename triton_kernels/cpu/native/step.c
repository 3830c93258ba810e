/* A step of a model on a CPU: a list of operations over rows, run to its end in one call.

   Every operation is cut into pieces. Threads take pieces as they are free, so that a thread that the system does not
   run takes none, and no thread waits for it unless it was stopped inside a piece. The thread that calls is one of them
   and could do all alone. */
#include "attention.h"
#include "attention_tiles.h"
#include "products.h"
#include "rows.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* Kinds of operations, and what their numbers are. A place is three: register, entries between rows, first entry. */
enum { RMS_NORM, LAYER_NORM, PRODUCT, ACTIVATE, ROTATE_AND_KEEP, ATTEND, ADD_LOOKED_UP, ADD, LARGEST };
#define OPERATION_NUMBERS 24

typedef struct {
    int64_t number[OPERATION_NUMBERS];
} Operation;

typedef struct {
    int64_t rows;                     /* tokens of the step */
    char *const *registers;           /* where each begins */
    const Cache *cache;
    const int32_t *positions;         /* [rows] */
    const int64_t *pool_slots;        /* [rows] block * block_tokens + offset */
    const int32_t *query_starts;      /* [sequences + 1] */
    const int32_t *block_tables;      /* [sequences][table_stride] */
    int64_t num_sequences, table_stride;
    int64_t type;
} Step;

/* Some query rows of one key head of one sequence, and the keys that they look at. One row of a long sequence is several
   items, its parts: who finishes the last of them puts them together.

   parts      how many there are; 1: the item is all
   share      the first of the parts in Job.shares, and in Job.num_finished */
typedef struct {
    int32_t sequence, head, first_row, num_rows, part, parts;
    int64_t share;
} Item;
#define TOKENS_A_PART 512             /* about: whole blocks */

typedef struct {
    const Step *step;
    const Operation *operations;
    int64_t num_operations;
    Item *items;
    int64_t num_items, tokens_an_item, blocks_a_part, num_shares;
    Found *shares;                    /* what parts found */
    _Atomic int32_t *num_finished;    /* of the parts that begin there; 0 between operations */
} Job;

typedef struct {
    char *row;                        /* of token 0 */
    int64_t stride;                   /* entries */
} Place;

INLINE Place place_at(const Step *step, const int64_t *numbers) {
    return (Place){step->registers[numbers[0]] + numbers[2] * bytes_of((int)step->type), numbers[1]};
}

INLINE char *row_at(Place place, int64_t row, int type) { return place.row + row * place.stride * bytes_of(type); }

INLINE float as_float(int64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return (float)value;
}

#define POINTER(TYPE, NUMBER) ((TYPE)(intptr_t)(NUMBER))

/* ---------------------------------------------------------------- pieces */

#define ENTRIES_A_PIECE 8192

static int64_t rows_a_piece(int64_t width) { return width >= ENTRIES_A_PIECE ? 1 : ENTRIES_A_PIECE / width; }

static int64_t pieces_of_rows(int64_t rows, int64_t width) {
    int64_t each = rows_a_piece(width);
    return (rows + each - 1) / each;
}

static int64_t panels_a_piece(const Matrix *m, int threads) {
    int64_t panels = num_panels(m);
    for (int64_t each = MOST_PANELS_A_PIECE; each > 1; each /= 2)
        if (panels / each >= 8 * threads) return each;
    return panels >= 8 ? 2 : 1;
}

typedef struct {
    int64_t first, end;
} Range;

static Range panels_of(const Matrix *m, int64_t piece, int threads) {
    int64_t each = panels_a_piece(m, threads), end = (piece + 1) * each, panels = num_panels(m);
    return (Range){piece * each, end < panels ? end : panels};
}

/* Entries per row that an operation works on, for those that work on rows one by one. */
static int64_t width_of(const Operation *o) {
    const int64_t *n = o->number;
    switch (n[0]) {
    case RMS_NORM: case LAYER_NORM: return n[7] * n[8];
    case ACTIVATE: return 2 * n[7];
    case ROTATE_AND_KEEP: return 4096;
    case ADD: return n[10];
    default: return n[7];
    }
}

static int64_t count_pieces(const Job *job, const Operation *o, int threads) {
    switch (o->number[0]) {
    case PRODUCT: case LARGEST: {
        const Matrix *m = POINTER(const Matrix *, o->number[7]);
        int64_t each = panels_a_piece(m, threads);
        return (num_panels(m) + each - 1) / each;
    }
    case ATTEND: return job->num_items;
    default: return pieces_of_rows(job->step->rows, width_of(o));
    }
}

/* ---------------------------------------------------------------- operations */

static void norm_rows(const Step *s, const int64_t *n, int64_t first, int64_t end, int type) {
    /* from[1..3], to[4..6], size 7, heads 8, which adjoin, weight 9, bias 10, epsilon 11, offset 12, and
       13: how far apart the weights of two heads are, 0 where they share them */
    Place from = place_at(s, n + 1), to = place_at(s, n + 4);
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

static void rotate_and_keep_rows(const Step *s, const int64_t *n, int64_t first, int64_t end, int type) {
    /* query[1..3], key[4..6], value[7..9], layer 10, cosines 11, sines 12, half 13 (0: nothing is rotated) */
    Place query = place_at(s, n + 1), key = place_at(s, n + 4), value = place_at(s, n + 7);
    const Cache *c = s->cache;
    int64_t size = c->head_size, width = size * bytes_of(type), half = n[13];
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
            char *k = (char *)page_of(c, block, n[10], 0, head) + offset * width;
            char *v = (char *)page_of(c, block, n[10], 1, head) + offset * width;
            const char *from = row_at(key, row, type) + head * width;
            if (half) rotate(from, k, cosines, sines, half, size, type);
            else memcpy(k, from, width);
            memcpy(v, row_at(value, row, type) + head * width, width);
        }
    }
}

static void attend_item(const Job *job, const int64_t *n, const Item *item, const Item *next, int type) {
    /* query[1..3], to[4..6], layer 7, scale 8, softcap 9, window 10, sinks 11, slopes 12, factor 13, sink logits 14 */
    const Step *s = job->step;
    const Cache *c = s->cache;
    Place query = place_at(s, n + 1), to = place_at(s, n + 4);
    int64_t size = c->head_size, width = size * bytes_of(type), group = c->query_heads / c->kv_heads;
    int64_t tokens_a_part = job->blocks_a_part * c->block_tokens;
    int query_type = type_of_queries(type);
    char queries[MOST_QUERY_ROWS * MOST_HEAD_SIZE * 4] __attribute__((aligned(64)));
    int64_t position[MOST_QUERY_ROWS];
    float slopes[MOST_QUERY_ROWS];
    Found here, *found = item->parts > 1 ? job->shares + item->share + item->part : &here;
    Scores how = {as_float(n[8]), as_float(n[9]), n[10], n[11], POINTER(const float *, n[12]), as_float(n[13]),
                  POINTER(const float *, n[14])};
    Look look = {n[7], item->head, s->block_tables + item->sequence * s->table_stride, queries, position, slopes, 0, 0,
                 INT64_MAX,
                 page_of(c, s->block_tables[next->sequence * s->table_stride
                                            + next->part * job->blocks_a_part], n[7], 0, next->head)};
    if (item->parts > 1) {
        look.first_key = item->part * tokens_a_part;
        look.end_key = item->part + 1 < item->parts ? look.first_key + tokens_a_part : INT64_MAX;
    }
    for (int64_t at = 0; at < group; at += MOST_QUERY_ROWS) {        /* more than once for very large groups alone */
        int64_t heads = group - at < MOST_QUERY_ROWS ? group - at : MOST_QUERY_ROWS, count = 0;
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
        look.rows = (int)count;
#if defined(HAS_ATTENTION_TILES)
        if (takes_tiles(c, look.rows)) attend_in_tiles(c, &how, &look, found);
        else
#endif
        if (type == FLOAT32) attend(c, &how, &look, found, FLOAT32);
        else attend(c, &how, &look, found, BFLOAT16);
        if (item->parts > 1) {
            _Atomic int32_t *finished = job->num_finished + item->share;
            if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) + 1 < item->parts) return;
            atomic_store_explicit(finished, 0, memory_order_relaxed);
            found = job->shares + item->share;
            for (int part = 1; part < item->parts; part++) add_found(found, found + part, look.rows, size);
        }
        count = 0;
        for (int64_t row = item->first_row; row < item->first_row + item->num_rows; row++)
            for (int64_t g = 0; g < heads; g++, count++) {
                char *y = row_at(to, row, type) + (item->head * group + at + g) * width;
                const float *from = found->sums[count];
                float total = found->total[count], shrink = 1;
                if (how.sink_logits) {
                    float logit = how.sink_logits[item->head * group + at + g], most = found->maximum[count];
                    float top = logit > most ? logit : most;
                    shrink = exponential(all(most - top))[0];
                    total = total * shrink + exponential(all(logit - top))[0];
                }
                int64_t i = 0;
                for (; i + LANES <= size; i += LANES) store(y, i, *(const floats *)(from + i) * shrink / total, type);
                for (; i < size; i++) store_one(y, i, from[i] * shrink / total, type);
            }
    }
}

static void run_rows(const Job *job, const int64_t *n, int64_t first, int64_t end, int type) {
    const Step *s = job->step;
    switch (n[0]) {
    case RMS_NORM: case LAYER_NORM:
        norm_rows(s, n, first, end, type);
        break;
    case ACTIVATE: {
        /* from[1..3], to[4..6], size 7, kind 8, gated 9 */
        Place from = place_at(s, n + 1), to = place_at(s, n + 4);
        for (int64_t row = first; row < end; row++)
            activate_row(row_at(from, row, type), row_at(to, row, type), n[7], (int)n[8], (int)n[9], type);
        break;
    }
    case ROTATE_AND_KEEP:
        rotate_and_keep_rows(s, n, first, end, type);
        break;
    case ADD_LOOKED_UP: case ADD: {
        /* from[1..3], to[4..6], then other[7..9] and size 10, or size 7 and a table 8 with a row for each position */
        Place from = place_at(s, n + 1), to = place_at(s, n + 4);
        int64_t size = n[0] == ADD ? n[10] : n[7];
        for (int64_t row = first; row < end; row++) {
            char *y = row_at(to, row, type);
            const char *x = row_at(from, row, type);
            const char *other = n[0] == ADD ? row_at(place_at(s, n + 7), row, type)
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
        /* from[1..3], to[4..6], matrix 7, adds 8, type of the result 9 */
        const Matrix *m = POINTER(const Matrix *, n[7]);
        Place from = place_at(s, n + 1);
        int result = (int)n[9];
        Target t = {s->registers[n[4]] + n[6] * bytes_of(result), n[5], result, (int)n[8]};
        Range panels = panels_of(m, piece, threads);
        multiply(m, from.row, from.stride, s->rows, &t, panels.first, panels.end);
        break;
    }
    case LARGEST: {
        /* from[1..3], matrix 7, for each piece and row the largest output 8 and its index 9 */
        const Matrix *m = POINTER(const Matrix *, n[7]);
        Place from = place_at(s, n + 1);
        Range panels = panels_of(m, piece, threads);
        largest_outputs(m, from.row, from.stride, s->rows, panels.first, panels.end,
                        POINTER(float *, n[8]) + piece * s->rows, POINTER(int64_t *, n[9]) + piece * s->rows);
        break;
    }
    case ATTEND:
        attend_item(job, n, job->items + piece,
                    job->items + (piece + threads < job->num_items ? piece + threads : piece), (int)s->type);
        break;
    default: {
        int64_t each = rows_a_piece(width_of(o)), first = piece * each, end = first + each;
        if (end > s->rows) end = s->rows;
        if (s->type == FLOAT32) run_rows(job, n, first, end, FLOAT32);
        else run_rows(job, n, first, end, BFLOAT16);
    }
    }
}

/* ---------------------------------------------------------------- threads */

/* One number says it all: which job, which of its operations, how many of its pieces are taken. So a thread that slept
   through the end of a job cannot take a piece of another. */
#define PIECE_BITS 24
#define OPERATION_BITS 20
#define STATE(JOB, OPERATION, PIECES) \
    (((uint64_t)(JOB) << (PIECE_BITS + OPERATION_BITS)) | ((uint64_t)(OPERATION) << PIECE_BITS) | (uint64_t)(PIECES))
#define PIECES(STATE) ((int64_t)((STATE) & ((1ull << PIECE_BITS) - 1)))
#define OPERATION(STATE) ((uint64_t)(((STATE) >> PIECE_BITS) & ((1ull << OPERATION_BITS) - 1)))
#define JOB(STATE) ((uint64_t)((STATE) >> (PIECE_BITS + OPERATION_BITS)))

#define NO_OPERATION ((1ull << OPERATION_BITS) - 1)
#define MOST_OPERATIONS (1 << 14)
#define MOST_THREADS 256
#define LOOKS_BEFORE_SLEEP 1000       /* 15 to 50 us: time for the next call of a step, not for the next step */
#define LOOKS_BEFORE_YIELD 1000

static struct {
    pthread_mutex_t owner;            /* held by whose job it is; who does not get it works alone */
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_t helpers[MOST_THREADS];
    int num_helpers, num_asleep;
    _Atomic int is_stopping;
    _Atomic uint64_t state;
    _Atomic int64_t num_done;
    _Atomic int threads;
    _Atomic int64_t processor_ns;     /* of all that worked on jobs, since the library was loaded */
    Job job;
    _Atomic int64_t num_pieces[MOST_OPERATIONS];
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

/* The first operation from this one on that has pieces. */
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
    int looks = 0;
    for (;;) {
        uint64_t seen = atomic_load_explicit(&pool.state, memory_order_acquire), operation = OPERATION(seen);
        if (JOB(seen) != number || operation == NO_OPERATION) return;
        if (PIECES(seen) >= num_pieces((int64_t)operation)) {        /* others finish it */
            pause_a_moment();
            if (++looks > LOOKS_BEFORE_YIELD) sched_yield();
            continue;
        }
        if (!atomic_compare_exchange_weak_explicit(&pool.state, &seen, seen + 1, memory_order_acq_rel,
                                                   memory_order_acquire)) continue;
        looks = 0;
        run_piece(&pool.job, pool.job.operations + operation, PIECES(seen), threads);
        int64_t count = num_pieces((int64_t)operation);
        if (atomic_fetch_add_explicit(&pool.num_done, 1, memory_order_acq_rel) + 1 == count) {
            atomic_store_explicit(&pool.num_done, 0, memory_order_relaxed);
            atomic_store_explicit(&pool.state, STATE(number, next_operation((int64_t)operation + 1), 0),
                                  memory_order_release);
        }
    }
}

/* Take pieces until the job of this number is over. */
static void work_on(uint64_t number, int threads) {
    int64_t start = processor_time_ns();
    take_pieces(number, threads);
    atomic_fetch_add_explicit(&pool.processor_ns, processor_time_ns() - start, memory_order_relaxed);
}

INLINE int is_for(uint64_t state, uint64_t done, int index) {
    return JOB(state) != done && OPERATION(state) != NO_OPERATION
           && index < atomic_load_explicit(&pool.threads, memory_order_relaxed);
}

static void *help(void *argument) {
    int index = (int)(intptr_t)argument, looks = 0;
    uint64_t done = 0;
    while (!atomic_load_explicit(&pool.is_stopping, memory_order_relaxed)) {
        uint64_t seen = atomic_load_explicit(&pool.state, memory_order_acquire);
        if (is_for(seen, done, index)) {
            work_on(JOB(seen), atomic_load_explicit(&pool.threads, memory_order_relaxed));
            done = JOB(seen);
            looks = 0;
        } else if (++looks < LOOKS_BEFORE_SLEEP) {
            pause_a_moment();
        } else {
            pthread_mutex_lock(&pool.lock);
            if (!is_for(atomic_load(&pool.state), done, index) && !atomic_load(&pool.is_stopping)) {
                pool.num_asleep++;
                pthread_cond_wait(&pool.work, &pool.lock);
                pool.num_asleep--;
            }
            pthread_mutex_unlock(&pool.lock);
            looks = 0;
        }
    }
    return 0;
}

/* In a forked child, where no helper is. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.owner, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.work, 0);
    pool.num_helpers = pool.num_asleep = 0;
    atomic_store(&pool.is_stopping, 0);
}

/* As many helpers as can be had, up to threads - 1. */
static void start_helpers(int threads) {
    static int is_watching_forks;
    if (!is_watching_forks) is_watching_forks = !pthread_atfork(0, 0, forget_helpers);
    while (pool.num_helpers < threads - 1 && pool.num_helpers < MOST_THREADS) {
        void *index = (void *)(intptr_t)(pool.num_helpers + 1);
        if (pthread_create(pool.helpers + pool.num_helpers, 0, help, index)) break;
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

/* ---------------------------------------------------------------- what Python calls */

/* The items of a step, and how many shares their parts have; items 0: they are counted only. */
static void list_items(Job *job, Item *items) {
    const Step *s = job->step;
    int64_t group = s->cache->query_heads / s->cache->kv_heads, count = 0, shares = 0;
    int64_t tokens_a_part = job->blocks_a_part * s->cache->block_tokens;
    for (int64_t sequence = 0; sequence < s->num_sequences; sequence++) {
        int64_t start = s->query_starts[sequence], end = s->query_starts[sequence + 1], parts = 1;
        if (end - start == 1 && group <= MOST_QUERY_ROWS) parts = s->positions[start] / tokens_a_part + 1;
        for (int64_t row = end; row > start; row -= job->tokens_an_item) {        /* the longest first */
            int64_t first = row - job->tokens_an_item > start ? row - job->tokens_an_item : start;
            for (int64_t head = 0; head < s->cache->kv_heads; head++) {
                for (int64_t part = 0; part < parts; part++, count++)
                    if (items)
                        items[count] = (Item){(int32_t)sequence, (int32_t)head, (int32_t)first, (int32_t)(row - first),
                                              (int32_t)part, (int32_t)parts, shares};
                if (parts > 1) shares += parts;
            }
        }
    }
    job->num_items = count;
    job->num_shares = shares;
}

/* Returns whether there is memory for the lists. */
static int make_lists(Job *job) {
    const Cache *c = job->step->cache;
    int64_t group = c->query_heads / c->kv_heads;
    job->tokens_an_item = group >= MOST_QUERY_ROWS ? 1 : MOST_QUERY_ROWS / group;
    job->blocks_a_part = (TOKENS_A_PART + c->block_tokens - 1) / c->block_tokens;
    list_items(job, 0);
    job->items = malloc((size_t)job->num_items * sizeof(Item) + 1);
    job->shares = aligned_alloc(64, (size_t)(job->num_shares + 1) * sizeof(Found));
    job->num_finished = calloc((size_t)job->num_shares + 1, sizeof *job->num_finished);
    if (!job->items || !job->shares || !job->num_finished) return 0;
    list_items(job, job->items);
    return 1;
}

static void free_lists(Job *job) {
    free(job->items);
    free(job->shares);
    free(job->num_finished);
}

/* Returns 0, or 1 where there is no memory for the list of pieces: then nothing was done. */
int run_step(const Step *step, const Operation *operations, int64_t num_operations, int threads) {
    Job job = {.step = step, .operations = operations, .num_operations = num_operations};
    if (step->cache && !make_lists(&job)) {
        free_lists(&job);
        return 1;
    }
    if (threads < 2 || num_operations > MOST_OPERATIONS || pthread_mutex_trylock(&pool.owner)) {
        run_alone(&job);
    } else {
        uint64_t number = (JOB(atomic_load(&pool.state)) + 1) & JOB(~0ull);
        start_helpers(threads);
        atomic_store(&pool.state, STATE(number, NO_OPERATION, 0));   /* a thread that looks now finds nothing to take */
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

/* End the helpers, after the job that runs. The next job makes new ones. */
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

/* Processor time of all threads in jobs so far. A thread adds its own when it leaves a job, the last one a moment after
   the job. */
int64_t processor_nanoseconds(void) { return atomic_load_explicit(&pool.processor_ns, memory_order_relaxed); }

/* The largest output of each row of x, NaN where one is, and the lowest index of those that equal it. Returns 0, or 1
   where there is no memory. */
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
        for (int64_t i = 0; i < pieces * rows; i++) largest[i] = -INFINITY;      /* of pieces that there are not */
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
