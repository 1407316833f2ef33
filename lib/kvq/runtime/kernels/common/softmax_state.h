#pragma once

#include <kvq/plan/page_layout.h>

#include <cmath>

namespace kvq {

/// An online softmax that is not divided by its sum yet, in base 2. Scores and partial results may be added in any
/// order. The functions return by which factors the weighted values belong to the new reference. `exp2` is 2^x, because
/// kernels use an instruction that the host does not have.
struct SoftmaxState {
  static constexpr float kEmpty = -__builtin_huge_valf();  ///< reference before the first token

  float max = kEmpty;  ///< reference of the exponentials: mostly the largest score
  float sum = 0.0f;    ///< of 2^(score - max)

  KVQ_HD constexpr bool empty() const { return max == kEmpty; }
  /// Does not scale the sum.
  KVQ_HD void raise(float reference) { max = fmaxf(max, reference); }

  /// 2^(other's reference - own one); 0 if `other` is empty. The own reference must be as large.
  template <typename Exp2>
  KVQ_HD float factor_of(const SoftmaxState& other, Exp2 exp2) const {
    return other.empty() ? 0.0f : exp2(other.max - max);
  }
  /// Adds a partial result whose reference is not above the own one.
  /// @return  factor of its values
  template <typename Exp2>
  KVQ_HD float add(const SoftmaxState& other, Exp2 exp2) {
    const float factor = factor_of(other, exp2);
    sum = fmaf(factor, other.sum, sum);
    return factor;
  }

  struct Factors {
    float own, other;
  };
  /// Merges any two partial results.
  template <typename Exp2>
  KVQ_HD Factors merge(const SoftmaxState& other, Exp2 exp2) {
    const SoftmaxState before = *this;
    raise(other.max);
    const float keep = factor_of(before, exp2), factor = factor_of(other, exp2);
    sum = fmaf(before.sum, keep, factor * other.sum);
    return {keep, factor};
  }
};

}  // namespace kvq
