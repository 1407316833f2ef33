#pragma once

#include <stdint.h>

/// libkvq_codec: the one loop of the codec that Python needs in compiled code, with C linkage. The perplexity program
/// loads the library by ctypes (python/kvq/native_codec.py).
#define KVQ_CODEC_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/// Version of this interface. A caller refuses a library of another version.
KVQ_CODEC_API int32_t kvq_codec_version(void);

/// Codes of groups of one trellis: those whose values are nearest to y (packing.md (d), the scale left out).
/// @param theta     [bits * (memory + 1)]
/// @param search    of packing.md (d): 0 binary32, 1 integer
/// @param y         [groups, channels]; channels 8 to 1024
/// @param threads   at least 1; the codes do not depend on it
/// @param codes     [groups, channels]
/// @param message   receives a line of text if the call fails; always ends with 0
/// @return          0; 1 for arguments that packing.md does not allow, or if memory is short
KVQ_CODEC_API int32_t kvq_codec_trellis(const float* theta, int32_t bits, int32_t memory, int32_t search,
                                        const float* y, int64_t groups, int64_t channels, int32_t threads,
                                        uint8_t* codes, char* message, int64_t message_bytes);

#ifdef __cplusplus
}
#endif
