/* A clock that goes wrong: preloaded into a process, it shifts what the process takes for the time of day by
 * the seconds that stand in a file, which whoever started the process may change. Clocks that only measure
 * how long something takes are left alone, as they are on a machine whose time is set. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *seconds_off;

__attribute__((constructor)) static void find_the_file(void) {
  const char *path = getenv("STREAMVISOR_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) seconds_off = mapped;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int failed = (int)syscall(SYS_clock_gettime, clock, time);
  if (!failed && seconds_off && clock == CLOCK_REALTIME) time->tv_sec += *seconds_off;
  return failed;
}
