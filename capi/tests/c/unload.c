// Loads the library, uses it, and unloads it: nothing of it is called after that. Usage: unload LIBRARY
#define _GNU_SOURCE
#include "vramalloc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static void *library;

// In a thread that ends: one that goes on has thread-local values of the library, which keep it loaded.
static void *use(void *round) {
    vram_status (*create)(const char *, const char *, vram_allocator *);
    vram_status (*alloc)(vram_allocator, uint64_t, int, void *, void **);
    vram_status (*destroy)(vram_allocator);
    *(void **)&create = dlsym(library, "vram_create");
    *(void **)&alloc = dlsym(library, "vram_alloc");
    *(void **)&destroy = dlsym(library, "vram_destroy");
    CHECK(create && alloc && destroy);
    vram_allocator allocator = 0;
    void *a = NULL;
    CHECK(create("sim", "segments:expandable", &allocator) == VRAM_STATUS_OK);
    CHECK(alloc(allocator, 3000, 0, NULL, &a) == VRAM_STATUS_OK);
    if (*(int *)round) CHECK(destroy(allocator) == VRAM_STATUS_OK);
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    alarm(60); // a hang ends by a signal
    for (int round = 0; round < 3; ++round) {
        library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        CHECK(library);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, use, &round) == 0 && pthread_join(thread, NULL) == 0);
        CHECK(dlclose(library) == 0);
        // It stays: what it has registered may be called.
        library = dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD);
        CHECK(library && dlclose(library) == 0);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) exit(0);
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("unloaded");
    return 0;
}
