// Millions of allocations and frees: 8 threads, 8 streams, blocks that change hands between threads and streams. At the
// end nothing is live, nothing is reserved, and the allocator is sound.
//
// Usage: soak DEVICE EVENTS [SEED]; VRAMALLOC_CONF configures.
#define _POSIX_C_SOURCE 199309L
#include "check.h"

#include <pthread.h>
#include <time.h>

enum { THREADS = 8, SLOTS = 256, PASSED_ON = 64 };

typedef struct {
    void *ptr;
    uint64_t bytes;
    int stream;
} block;

static vram_allocator allocator;
static void *streams[THREADS];
static uint64_t events_each;

// Blocks on their way from one thread to another.
static block passed_on[PASSED_ON];
static pthread_mutex_t passing = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
    int number;
    uint64_t seed, out_of_memory;
} worker;

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

// Mostly small, some up to 1 MiB, a few large.
static uint64_t some_bytes(uint64_t *state) {
    const uint64_t kind = next(state) % 100, random = next(state);
    if (kind < 70) return 1 + random % (64 << 10);
    if (kind < 95) return 1 + random % (1 << 20);
    return 1 + random % (24 << 20);
}

static void give(block *b) {
    // One in four was last used on another stream than its own.
    const int stream = b->bytes % 4 == 0 ? (b->stream + 1) % THREADS : b->stream;
    OK(vram_free(allocator, b->ptr, b->bytes, 0, streams[stream]));
    b->ptr = NULL;
}

static void *work(void *argument) {
    worker *me = argument;
    block slots[SLOTS] = {{0}};
    uint64_t state = me->seed, done = 0;
    while (done < events_each) {
        block *b = &slots[next(&state) % SLOTS];
        if (b->ptr) {
            if (next(&state) % 8 == 0) {
                block *place = &passed_on[next(&state) % PASSED_ON];
                pthread_mutex_lock(&passing);
                const block other = *place;
                *place = *b;
                *b = other;
                pthread_mutex_unlock(&passing);
            }
            if (b->ptr) {
                give(b);
                ++done;
            }
            continue;
        }
        b->bytes = some_bytes(&state);
        // Mostly on its own stream; sometimes on one that another thread allocates on, too.
        b->stream = next(&state) % 16 ? me->number : (int)(next(&state) % THREADS);
        const vram_status status = vram_alloc(allocator, b->bytes, 0, streams[b->stream], &b->ptr);
        ++done;
        if (status == VRAM_STATUS_OUT_OF_MEMORY) {
            b->ptr = NULL;
            ++me->out_of_memory;
            continue;
        }
        OK(status);
        if (next(&state) % 16 == 0)
            OK(vram_record_stream(allocator, b->ptr, 0, streams[next(&state) % THREADS]));
        if (next(&state) % 65536 == 0) OK(vram_empty_cache(allocator, 0, NULL));
    }
    for (int i = 0; i < SLOTS; ++i)
        if (slots[i].ptr) give(&slots[i]);
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc > 2);
    const uint64_t events = strtoull(argv[2], NULL, 10);
    const uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 20240607;
    events_each = events / THREADS;
    OK(vram_create(argv[1], NULL, &allocator));
    for (int i = 0; i < THREADS; ++i) OK(vram_create_stream(allocator, 0, &streams[i]));

    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    pthread_t threads[THREADS];
    worker workers[THREADS];
    for (int i = 0; i < THREADS; ++i) {
        workers[i] = (worker){.number = i, .seed = seed * 2654435761u + (uint64_t)i + 1};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    uint64_t out_of_memory = 0;
    for (int i = 0; i < THREADS; ++i) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        out_of_memory += workers[i].out_of_memory;
    }
    for (int i = 0; i < PASSED_ON; ++i)
        if (passed_on[i].ptr) give(&passed_on[i]);
    clock_gettime(CLOCK_MONOTONIC, &end);

    OK(vram_validate(allocator, 0));
    vram_stats stats;
    OK(vram_get_stats(allocator, 0, &stats, sizeof stats));
    CHECK(stats.allocation.all.current == 0 && stats.allocated_bytes.all.current == 0);
    CHECK(stats.allocation.all.allocated == stats.allocation.all.freed);
    emptied(allocator);
    OK(vram_validate(allocator, 0));
    OK(vram_get_stats(allocator, 0, &stats, sizeof stats));
    CHECK(stats.active.all.current == 0 && stats.reserved_bytes.all.current == 0);
    CHECK(stats.num_ooms == out_of_memory);
    const double seconds = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    printf("soak: %llu allocations, %llu frees on %s, seed %llu: %.1f s, %.0f ns an event; peak %llu MiB allocated, "
           "%llu reserved; %llu driver calls took memory; out of memory %llu times; nothing live, nothing reserved, sound\n",
           (unsigned long long)stats.allocation.all.allocated, (unsigned long long)stats.allocation.all.freed, argv[1],
           (unsigned long long)seed, seconds, 1e9 * seconds / (double)events,
           (unsigned long long)(stats.allocated_bytes.all.peak >> 20),
           (unsigned long long)(stats.reserved_bytes.all.peak >> 20), (unsigned long long)stats.num_device_alloc,
           (unsigned long long)out_of_memory);
    OK(vram_destroy(allocator));
    return 0;
}
