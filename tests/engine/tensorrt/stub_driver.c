// A CUDA driver that only says what it is called with (on standard error), for the real cuda.bindings to be tried on:
// whether they take the arguments that the door gives them. Nothing is computed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLAIN(name) int name(void) { return 0; }
#define TOLD(name) int name(void *one) { fprintf(stderr, #name " %p\n", one); return 0; }
typedef unsigned long long address;

PLAIN(cuInit)
PLAIN(cuCtxPushCurrent_v2)
PLAIN(cuCtxPopCurrent_v2)
PLAIN(cuDevicePrimaryCtxRelease_v2)
PLAIN(cuEventRecord)
TOLD(cuStreamDestroy_v2)
TOLD(cuEventDestroy_v2)
TOLD(cuMemFree_v2)
TOLD(cuGraphDestroy)
TOLD(cuGraphExecDestroy)
TOLD(cuModuleUnload)
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0xc0; return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Orin", size); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? 8 : which == 76 ? 7 : which == 18;
    return 0;
}
int cuMemGetInfo_v2(size_t *left, size_t *all) { *left = 1; *all = 2; return 0; }
int cuMemAlloc_v2(address *made, size_t size) { *made = 0x700000000; return 0; }
int cuMemHostAlloc(void **made, size_t size, unsigned flags) {
    *made = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    fprintf(stderr, "cuMemHostAlloc %zu %u\n", size, flags);
    return 0;
}
int cuMemFreeHost(void *memory) { free(memory); return 0; }
int cuMemHostGetDevicePointer_v2(address *seen, void *memory, unsigned flags) {
    *seen = (address)(uintptr_t)memory;
    return 0;
}
int cuStreamCreate(void **made, unsigned flags) { *made = (void *)(uintptr_t)(0x100 + flags); return 0; }
int cuEventCreate(void **made, unsigned flags) { *made = (void *)(uintptr_t)(0x200 + flags); return 0; }
int cuEventQuery(void *event) { return event == (void *)0x202 ? 600 : 0; }
int cuEventElapsedTime(float *ms, void *start, void *end) { *ms = 1.5f; return 0; }
int cuEventElapsedTime_v2(float *ms, void *start, void *end) { *ms = 1.5f; return 0; }
int cuStreamSynchronize(void *stream) { return 700; }
int cuMemcpyHtoDAsync_v2(address to, const char *from, size_t size, void *stream) {
    fprintf(stderr, "cuMemcpyHtoDAsync %llx %d %zu %p\n", to, from[0], size, stream);
    return 0;
}
int cuMemcpyDtoHAsync_v2(char *to, address from, size_t size, void *stream) {
    to[0] = 9;
    fprintf(stderr, "cuMemcpyDtoHAsync %llx %zu %p\n", from, size, stream);
    return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode) { fprintf(stderr, "cuStreamBeginCapture %d\n", mode); return 0; }
int cuStreamEndCapture(void *stream, void **graph) { *graph = (void *)0x300; return 0; }
int cuGraphInstantiateWithFlags(void **made, void *graph, address flags) { *made = (void *)0x301; return 0; }
int cuGraphLaunch(void *graph, void *stream) { fprintf(stderr, "cuGraphLaunch %p %p\n", graph, stream); return 0; }
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)0x400;
    return memcmp(image, "IMAGE", 5) ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x401;
    return strcmp(name, "letterbox") ? 500 : 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **given, void **extra) {
    fprintf(stderr, "cuLaunchKernel %u %u %u, %u %u %u, %u %p: %llx %d %g\n", gx, gy, gz, bx, by, bz, shared, stream,
            *(address *)given[0], *(int *)given[1], *(float *)given[2]);
    return extra != 0;
}
int cuGetErrorString(int number, const char **words) {
    *words = number == 700 ? "an illegal memory access was encountered" : "named symbol not found";
    return 0;
}

static int missing(void) { return 801; }

// Every function but these two is looked up by it; it has other versions of some.
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    static const char *ends[] = {"_v2", "", "WithFlags"};
    char whole[200];
    Dl_info own;
    dladdr((void *)cuInit, &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW);
    *found = 0;
    for (int each = 0; each < 3 && *found == 0; each++) {
        snprintf(whole, sizeof whole, "%s%s", name, ends[each]);
        *found = dlsym(library, whole);
    }
    if (*found == 0) *found = (void *)missing;
    if (status != 0) *status = 0;
    return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
