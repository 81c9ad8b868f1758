// Ends with something left. Usage: leak destroy|exit|torch|nothing
#include "check.h"

int main(int argc, char **argv) {
    CHECK(argc > 1);
    vram_allocator allocator = 0;
    void *a = NULL;
    if (strcmp(argv[1], "torch") == 0) {
        CHECK(vram_torch_alloc(3000, 0, NULL) != NULL);
        return 0;
    }
    OK(vram_create("sim", NULL, &allocator));
    OK(vram_alloc(allocator, 3000, 0, NULL, &a));
    if (strcmp(argv[1], "nothing") == 0) OK(vram_free(allocator, a, 3000, 0, NULL));
    if (strcmp(argv[1], "destroy") == 0) OK(vram_destroy(allocator));
    return 0;
}
