// Ends with something left. Usage: leak destroy|exit|torch|nothing|threads
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <unistd.h>

enum { THREADS = 4, SECONDS = 60 };

static vram_allocator allocator;
static pthread_barrier_t started;

// Goes on while the process ends around it.
static void *work(void *argument) {
    (void)argument;
    for (unsigned i = 0;; ++i) {
        void *a = NULL;
        // What the exit has taken away may give an error, and nothing worse.
        if (vram_alloc(allocator, 1 + i % 5000000, 0, NULL, &a) == VRAM_STATUS_OK) vram_free(allocator, a, 0, 0, NULL);
        vram_torch_free(vram_torch_alloc(1 + i % 4000, 0, NULL), 0, 0, NULL);
        if (i == 100) pthread_barrier_wait(&started);
    }
    return NULL;
}

// As a static destructor of C++ that has a tensor.
static void *held;

__attribute__((destructor)) static void free_at_the_end(void) {
    if (held) vram_torch_free(held, 3000, 0, NULL);
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    alarm(SECONDS); // a hang ends by a signal
    void *a = NULL;
    if (strcmp(argv[1], "torch") == 0) {
        held = vram_torch_alloc(3000, 0, NULL);
        CHECK(held != NULL);
        return 0;
    }
    OK(vram_create("sim", NULL, &allocator));
    OK(vram_alloc(allocator, 3000, 0, NULL, &a));
    if (strcmp(argv[1], "nothing") == 0) OK(vram_free(allocator, a, 3000, 0, NULL));
    if (strcmp(argv[1], "destroy") == 0) OK(vram_destroy(allocator));
    if (strcmp(argv[1], "threads") == 0) {
        CHECK(pthread_barrier_init(&started, NULL, THREADS + 1) == 0);
        pthread_t thread;
        for (int i = 0; i < THREADS; ++i) CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
        pthread_barrier_wait(&started);
    }
    return 0;
}
