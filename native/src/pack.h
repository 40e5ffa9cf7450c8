// From the blocks of a GGUF tensor, or from plain floats, to the packed layout. Quantized sources are repacked without loss.
#pragma once
#include "packed.h"
#include "pool.h"

namespace headrace {

// ggml's type numbers, as they stand in a GGUF header.
enum class Source : int { f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, bf16 = 30 };

bool source_known(int type);
size_t source_row_bytes(Source s, int64_t k);
Format natural_format(Source s);  // the packed format that holds this source exactly

// Pack n rows of k inputs into `out` (shape(format, n, k).bytes() long). `format` is the source's natural one, or, for a
// float source, any float format, s8 plain (amax / 127) or u4 min ((max - min) / 15) per group of 32.
void pack(Source source, const uint8_t* src, const Matrix& shape, uint8_t* out, Pool& pool);

// A 64-bit digest of bytes, the same for any number of threads; guards against damage, not against malice.
uint64_t checksum(const uint8_t* data, int64_t n, Pool& pool);

}  // namespace headrace
