#pragma once

/// Rates that --dry-run predicts with. Each has its measurement: docs/measurements.md, "Speed of the calibration".
namespace kvq::rates {

// Processors. The rate of matrix products is measured when a prediction is made; these are of release builds.

/// Attention's share of the rate of matrix products, with two threads and less for each doubling: 0.44 with 16.
inline constexpr double kOfGemm = 0.7, kLessOfGemm = 0.087, kLeastOfGemm = 0.3;
inline constexpr double kReadRate = 1.56e9;  ///< bytes a second that one thread reads, hashes and checks: 109 MB, 70 ms
inline constexpr double kSearchSeconds = 3e-5;  ///< clip search, for each sampled row and side, of one thread
inline constexpr double kTriedBudgets = 10.0;   ///< times that a budget quantizes held-out rows
inline constexpr double kSerialShare = 0.2;     ///< of a budget's decision: what one thread does while others wait

// One NVIDIA H200 and 16 processors beside it; a layer is one of Qwen3-8B (32 and 8 heads of 128 channels, bfloat16)
// with 8878 tokens.

inline constexpr double kStartSeconds = 0.35;        ///< of CUDA, once
inline constexpr double kCopyRate = 22e9;            ///< bytes a second to the device: a layer's 109 MB, 5 ms
inline constexpr double kAttentionRate = 78e12;      ///< FLOP/s: attention moments of a layer, 8 ms without copies
inline constexpr double kScoreRate = 39e12;          ///< FLOP/s: 8 ms more with scored queries
inline constexpr double kPartsFactor = 3.0;          ///< attention of float16 and float32, three parts each: estimated
inline constexpr double kGroupSeconds = 2e-4;        ///< a second moment: 1.8 ms for 8 heads of keys
inline constexpr double kMomentSeconds = 8e-12;      ///< and for each number of the rows: 20 bytes at 2.5 TB/s
inline constexpr double kEighSeconds = 13e-3 / 576;  ///< a matrix of 128; grows with the cube
/// Like kSearchSeconds, with golden rows and the artifact, which take the rest of 1.3 s.
inline constexpr double kDeviceSearchSeconds = 1.3 / (36 * 16 * 2048);
inline constexpr double kCodeSeconds = 5.0 / (36 * 16 * 14336);  ///< quantizes a row of 128 channels with a trellis
inline constexpr double kClusterRate = 13e12;  ///< FLOP/s of k-means with its seeding: 25 steps, C = 256, in 41 ms
inline constexpr double kSaveRate = 1.05e9;    ///< bytes a second of statistics: a layer in 29 ms
inline constexpr double kLoadRate = 0.87e9;    ///< bytes a second to read them again: a layer in 35 ms
/// Seconds that processors take for the plans of one head and side under a budget, all threads together, at head_dim
/// 128; grows with the cube. 16 threads take 0.22 s for a layer.
inline constexpr double kBudgetSeconds = 0.22;

/// How much faster layers are read and written, and loaded to be decided, because some are in work side by side: 36
/// layers take 1.5 s from the first reading to the last writing, and 0.73 s to be decided.
inline constexpr double kLayersRead = 1.7, kLayersDecided = 2.5;
/// Layers in memory at a time, at most; and as many as have so many bytes together, but two at least.
inline constexpr double kLayersInWork = 6.0, kBytesInWork = 2.0 * (1 << 30);

/// Processors of the machine that was measured.
inline constexpr int kCoresBeside = 16;

}  // namespace kvq::rates
