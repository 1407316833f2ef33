#include <kvq/runtime/checks.h>
#include <kvq/runtime/kernels/merge/params.h>

#include <cstdint>
#include <limits>
#include <tuple>

namespace kvq {

Status check_merge(const MergeParams& p) {
  constexpr StatusCode kBad = StatusCode::invalid_argument;
  if (p.num_states < 1) return Status::fail(kBad, "merge: num_states is %d, expected 1 or more", p.num_states);
  if (p.num_tokens < 0) return Status::fail(kBad, "merge: num_tokens is %d, expected 0 or more", p.num_tokens);
  if (p.num_heads < 1) return Status::fail(kBad, "merge: num_heads is %d, expected 1 or more", p.num_heads);
  if (p.head_dim < 8 || p.head_dim % 8 != 0)
    return Status::fail(kBad, "merge: head_dim is %d, expected a multiple of 8", p.head_dim);
  if (p.num_tokens == 0) return {};
  if (!p.states || !p.state_lse || !p.out)
    return Status::fail(kBad, "merge: states, state_lse and out must not be null");
  if (!aligned_to_16(p.states) || !aligned_to_16(p.out))
    return Status::fail(kBad, "merge: states and out must be aligned to 16 bytes");
  if (const Status status = check_numbers("merge", "state_lse and lse", {p.state_lse, p.lse}, 4); !status.ok())
    return status;
  const std::int64_t row = std::int64_t{p.num_heads} * p.head_dim;
  for (const auto& [name, stride, least] :
       {std::tuple{"token_stride", p.token_stride, p.num_tokens > 1 ? row : 0},
        std::tuple{"out_stride", p.out_stride, p.num_tokens > 1 ? row : 0},
        std::tuple{"state_stride", p.state_stride, p.num_states > 1 ? std::int64_t{1} : 0}})
    if (stride < least || stride % 8 != 0)
      return Status::fail(kBad, "merge: %s is %lld, expected a multiple of 8, %lld or more", name,
                          static_cast<long long>(stride), static_cast<long long>(least));
  if (row > std::numeric_limits<int>::max() / p.num_tokens)
    return Status::fail(StatusCode::unsupported, "merge: %d tokens of %d heads: more than one launch merges",
                        p.num_tokens, p.num_heads);
  return {};
}

}  // namespace kvq
