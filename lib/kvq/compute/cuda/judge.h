#pragma once

#include <kvq/compute/backend.h>
#include <kvq/compute/cuda/context.h>

#include <memory>
#include <vector>

namespace kvq::cuda {

/// Whether the kernels take such heads: all of one shape, with as many keys as shared memory has room for.
bool can_judge(const std::vector<AttentionCase>& heads);
/// Backend::judge_outputs(). The context outlives the judge.
std::unique_ptr<OutputJudge> judge_outputs(Context& context, std::vector<AttentionCase> heads);

}  // namespace kvq::cuda
