// What tools that poll NVML into a text file do: read each GPU, format a line, write it, sleep a millisecond. One line a
// reading, `<device> <ns since start> <bytes>`. Build: cc -O2 -o poll_and_print poll_and_print.c -ldl
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

typedef struct { unsigned long long total, free_bytes, used; } memory;
static volatile sig_atomic_t stopped;
static void stop(int number) { (void)number; stopped = 1; }
static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv) {
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!library || argc != 2) { fprintf(stderr, "%s\n", library ? "usage: poll_and_print OUT.txt" : dlerror()); return 1; }
  int (*init)(void) = dlsym(library, "nvmlInit_v2"), (*count)(unsigned *) = dlsym(library, "nvmlDeviceGetCount_v2");
  int (*handle)(unsigned, void **) = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  int (*read_memory)(void *, memory *) = dlsym(library, "nvmlDeviceGetMemoryInfo");
  unsigned gpus = 0;
  void *gpu[64];
  FILE *out = fopen(argv[1], "w");
  if (!out || init() || count(&gpus) || gpus > 64) return 1;
  for (unsigned i = 0; i < gpus; i++) if (handle(i, &gpu[i])) return 1;
  signal(SIGINT, stop);
  signal(SIGTERM, stop);
  for (long long begin = now(); !stopped;) {
    for (unsigned i = 0; i < gpus; i++) {
      memory m;
      if (read_memory(gpu[i], &m)) return 1;
      fprintf(out, "%u %lld %llu\n", i, now() - begin, m.used);
    }
    nanosleep(&(struct timespec){0, 1000000}, 0);
  }
  return fclose(out);
}
