#include "pages.h"

#include <cerrno>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // older headers than kernels
#endif
#endif

namespace headrace {

int populate(uint8_t* begin, int64_t bytes) {
#ifdef __linux__
  // Reading pages and writing back what was read would do elsewhere too, but not beside threads that write there.
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)begin / page * page;
  const size_t length = bytes == 0 ? 0 : (uintptr_t)begin + (size_t)bytes - first;
  return madvise((void*)first, length, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
#else
  (void)begin, (void)bytes;
  return EINVAL;
#endif
}

}  // namespace headrace
