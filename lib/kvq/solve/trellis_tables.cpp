#include <kvq/solve/trellis_tables.h>

#include <algorithm>
#include <array>

namespace kvq {

namespace {

struct Row {
  int bits, memory;
  std::array<float, 9> theta;
};

constexpr Row kRows[] = {
    {2, 1, {1.48225427f, 0.918767927f, -0.792501826f, 0.993044327f}},
    {2, 2, {-0.886770233f, -1.34449962f, 0.717407561f, -0.0397294397f, 0.927222248f, -0.814774881f}},
    {2,
     3,
     {0.955407229f, 0.953921669f, -0.519271679f, 0.508955923f, 0.482909586f, 0.52327051f, 0.956043081f, -0.933100524f}},
    {3, 1, {1.37657522f, -1.09347555f, 0.68231607f, 0.947085401f, 1.08014076f, 0.488084484f}},
    {3,
     2,
     {1.26534994f, 1.00769529f, 0.546827156f, -0.119927383f, 0.354457651f, 0.670707303f, 0.895332011f, -0.94432942f,
      -0.465584726f}},
    {4,
     1,
     {1.2847827f, 1.1339953f, 0.911722797f, 0.601804498f, 0.910166869f, -0.982628213f, -0.266429482f, 0.453091539f}},
};

}  // namespace

std::vector<TrellisTaps> trellis_taps(int bits, int memory, int channels) {
  // Limits measured with the codec at 8, 16, 32, 64 and 128 channels: the tail-biting path must close, which costs
  // short groups accuracy.
  memory = std::min(memory, channels < 12 ? 1 : channels < 24 ? 2 : 3);
  const Row* best = nullptr;
  for (const Row& row : kRows)
    if (row.bits == bits && row.memory <= memory && (!best || row.memory > best->memory)) best = &row;
  if (!best) return {};
  const std::ptrdiff_t size = std::ptrdiff_t{best->bits} * (best->memory + 1);
  return {{.bits = best->bits,
           .memory = best->memory,
           .search = TrellisSearch::integer,
           .theta = {best->theta.begin(), best->theta.begin() + size}}};
}

}  // namespace kvq
