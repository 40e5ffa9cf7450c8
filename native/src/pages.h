// Giving memory its pages before it is used.
#pragma once
#include <cstdint>

namespace headrace {

// Gives every page of [begin, begin + bytes) its memory, as if each were written, without changing what is there. 0, or the
// system's error number (EINVAL where the kernel cannot: Linux can since 5.14). With 0 bytes it only tells that.
int populate(uint8_t* begin, int64_t bytes);

}  // namespace headrace
