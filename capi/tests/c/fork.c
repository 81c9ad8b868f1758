// A forked child may call everything: it gets an error, or nothing is done, whatever other threads of the parent held at
// that moment. Usage: fork DEVICE ROUNDS; VRAMALLOC_DEVICE names the device of the process's own allocator.
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, CHILD_SECONDS = 20 };

static vram_allocator allocator, own;
static atomic_bool over;
static void *kept, *stream;

// Each thread has its own favourites, so that at any moment some lock of every kind is held.
static void *work(void *argument) {
    const int me = *(int *)argument;
    for (unsigned i = 0; !atomic_load(&over); ++i) {
        void *a = NULL, *b = NULL;
        OK(vram_alloc(allocator, 1 + i % 70000, 0, i % 2 ? stream : NULL, &a));
        b = vram_torch_alloc(1 + i % 3000000, 0, NULL);
        CHECK(b != NULL);
        vram_stats stats;
        char text[1 << 16];
        uint64_t freed;
        vram_allocator made = 0;
        void *fresh = NULL;
        switch (me) {
        case 0:
            OK(vram_empty_cache(allocator, -1, &freed));
            vram_torch_empty_cache();
            break;
        case 1:
            OK(vram_create("sim", i % 2 ? "segments:expandable" : "", &made));
            OK(vram_destroy(made));
            break;
        case 2:
            OK(vram_get_stats(allocator, 0, &stats, sizeof stats));
            OK(vram_stats_json(own, 0, text, sizeof text, NULL));
            OK(vram_validate(allocator, 0));
            break;
        default:
            if (i % 16 == 0 && i < 3200) { // streams live as long as the allocator
                OK(vram_create_stream(allocator, 0, &fresh));
                OK(vram_retire_stream(allocator, 0, fresh));
                OK(vram_record_history(allocator, 0, 1000, VRAM_STACKS_OFF));
                OK(vram_stop_history(allocator, 0));
                FAILS(INVALID_ARGUMENT, vram_create("nothing", NULL, &made)); // what is said takes a lock, too
            }
        }
        OK(vram_free(allocator, a, 0, 0, i % 3 ? stream : NULL));
        vram_torch_free(b, 0, 0, NULL);
    }
    return NULL;
}

static void everything_is_refused(void) {
    vram_allocator made = 77;
    vram_stats stats;
    char text[1 << 16];
    size_t needed = 0;
    uint64_t freed = 77;
    void *out = &freed;
    const vram_pool_id pool = {3, 4};
    CHECK(vram_abi_version() == VRAM_ABI_VERSION);
    FAILS(FORKED, vram_create("sim", NULL, &made));
    FAILS(FORKED, vram_create(NULL, NULL, NULL));
    FAILS(FORKED, vram_process_allocator(&made));
    FAILS(FORKED, vram_destroy(allocator));
    FAILS(FORKED, vram_destroy(0));
    FAILS(FORKED, vram_alloc(allocator, 512, 0, stream, &out));
    FAILS(FORKED, vram_alloc(allocator, 0, 5, NULL, &out));
    FAILS(FORKED, vram_free(allocator, kept, 0, 0, stream));
    FAILS(FORKED, vram_free(allocator, NULL, 0, 0, stream));
    FAILS(FORKED, vram_record_stream(allocator, kept, 0, stream));
    FAILS(FORKED, vram_create_stream(allocator, 0, &out));
    FAILS(FORKED, vram_retire_stream(allocator, 0, stream));
    FAILS(FORKED, vram_empty_cache(allocator, -1, &freed));
    FAILS(FORKED, vram_grant_access(allocator, 0, 1));
    FAILS(FORKED, vram_set_memory_fraction(allocator, 0, 0.5));
    FAILS(FORKED, vram_get_stats(allocator, 0, &stats, sizeof stats));
    FAILS(FORKED, vram_stats_json(allocator, 0, text, sizeof text, &needed));
    FAILS(FORKED, vram_driver_calls_json(allocator, 0, text, sizeof text, &needed));
    FAILS(FORKED, vram_memory_summary(allocator, 0, text, sizeof text, &needed));
    FAILS(FORKED, vram_memory_summary_abbreviated(allocator, 0, text, sizeof text, &needed));
    FAILS(FORKED, vram_record_history(allocator, 0, 1000, VRAM_STACKS_OFF));
    FAILS(FORKED, vram_stop_history(allocator, 0));
    FAILS(FORKED, vram_snapshot(allocator, 0, "/dev/null"));
    FAILS(FORKED, vram_reset_peak_stats(allocator, 0));
    FAILS(FORKED, vram_reset_accumulated_stats(allocator, 0));
    FAILS(FORKED, vram_validate(allocator, 0));
    CHECK(strstr(vram_last_error(), "fork"));
    CHECK(made == 77 && freed == 77 && out == (void *)&freed && needed == 0);

    CHECK(vram_torch_alloc(512, 0, NULL) == NULL);
    CHECK(vram_torch_segment_alloc(512, 0, NULL) == NULL);
    CHECK(vram_cupy_malloc(NULL, 512, 0) == NULL);
    vram_torch_free(kept, 512, 0, NULL);
    vram_torch_segment_free(kept, 512, 0, NULL);
    vram_cupy_free(NULL, kept, 0);
    vram_torch_record_stream(kept, stream);
    vram_torch_empty_cache();
    vram_torch_set_memory_fraction(0.5, 0);
    vram_torch_begin_allocate_to_pool(0, pool, NULL);
    vram_torch_end_allocate_to_pool(0, pool);
    vram_torch_release_pool(0, pool);
}

static void child(int round) {
    alarm(CHILD_SECONDS); // a hang ends by a signal, which the parent sees
    everything_is_refused();
    if (round % 2) _exit(0);
    exit(0); // with all that happens at an exit
}

int main(int argc, char **argv) {
    CHECK(argc > 2);
    // A child that was forked before the first use may use it all.
    pid_t pid = fork();
    CHECK(pid >= 0);
    int status = 0;
    if (pid == 0) {
        OK(vram_create(argv[1], NULL, &allocator));
        OK(vram_destroy(allocator));
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);

    OK(vram_create(argv[1], NULL, &allocator));
    OK(vram_process_allocator(&own));
    OK(vram_create_stream(allocator, 0, &stream));
    OK(vram_alloc(allocator, 4096, 0, stream, &kept));
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int i = 0; i < THREADS; ++i) {
        numbers[i] = i;
        CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
    }
    const int rounds = atoi(argv[2]);
    for (int round = 0; round < rounds; ++round) {
        fflush(NULL);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) child(round);
        CHECK(waitpid(pid, &status, 0) == pid);
        if (WIFSIGNALED(status)) fprintf(stderr, "round %d: the child ended by signal %d\n", round, WTERMSIG(status));
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        OK(vram_validate(allocator, 0)); // the parent goes on
        usleep(500);
    }
    atomic_store(&over, true);
    for (int i = 0; i < THREADS; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
    OK(vram_free(allocator, kept, 4096, 0, stream));
    OK(vram_validate(allocator, 0));
    OK(vram_destroy(allocator));
    printf("%d forks: every function is refused in the child, and none hangs\n", rounds);
    return 0;
}
