#include <kvq/codec/codec.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/codec/poisoned.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

/// How far a probe moves x_rot, relative to the row's largest channel: more than the error of a rotation in float32.
constexpr float kProbe = 0x1p-18f;
/// Least relative gap between the two smallest sums of squares for which the choice of a centroid is firm.
constexpr float kCentroidGap = 0x1p-14f;
constexpr float kOutputTolerance = 1e-6f;

struct Choice {
  int centroid = 0;
  bool firm = true;
};

Choice smallest(std::span<const float> sums) {
  const auto best = std::min_element(sums.begin(), sums.end());
  float second = INFINITY;
  for (auto it = sums.begin(); it != sums.end(); ++it)
    if (it != best) second = std::min(second, *it);
  return {static_cast<int>(best - sums.begin()), second - *best > *best * kCentroidGap};
}

/// Moves all channels by one step; where j & mask is not 0, channel j moves against the others. Mask 0 moves every two
/// channels together. Two channels differ in some bit of their index, so the mask of that bit moves them against each
/// other.
/// @param same  moved row -> whether its bytes are the expected ones
template <typename Same>
bool all_probes(std::span<const float> x_rot, float step, Same same) {
  std::vector<float> moved(x_rot.size());
  for (std::size_t mask = 0; mask < moved.size(); mask = mask == 0 ? 1 : 2 * mask)
    for (const float up : {step, -step}) {
      for (std::size_t j = 0; j < moved.size(); ++j) moved[j] = x_rot[j] + ((j & mask) != 0 ? -up : up);
      if (!same(moved)) return false;
    }
  return true;
}

/// Quantizes one side of a layer, token by token, because the choice of joint centroids needs all heads.
class SideCoder {
 public:
  SideCoder(const TensorPlan& plan, int heads, int dim)
      : plan_(plan),
        exact_(is_exact(plan.coder)),
        heads_(static_cast<std::size_t>(heads)),
        dim_(static_cast<std::size_t>(dim)),
        row_bytes_(static_cast<std::size_t>(row_bytes(plan, dim))) {
    for (int h = 0; h < heads; ++h) codecs_.emplace_back(plan, h, dim);
  }

  /// @param bits     [N, H, D] bfloat16
  /// @param decoded  [N, H, D] the dequantized rows, rotated back
  GoldenSide run(std::span<const std::uint16_t> bits, std::vector<float>& decoded, const ForEach& for_each) const {
    std::vector<float> x(bits.size());
    std::transform(bits.begin(), bits.end(), x.begin(), bf16_to_float);
    const std::size_t rows = x.size() / dim_;
    GoldenSide side{.bytes = std::vector<std::uint8_t>(rows * row_bytes_), .firm = std::vector<std::uint8_t>(rows)};
    decoded.resize(x.size());
    for_each(static_cast<std::int64_t>(rows / heads_), [&](std::int64_t token) {
      const std::size_t first = static_cast<std::size_t>(token) * heads_;
      const std::vector<Choice> choices = choose(std::span(x).subspan(first * dim_, heads_ * dim_));
      Codes codes{.codes = std::vector<std::uint8_t>(dim_), .numbers = {}};
      for (std::size_t h = 0; h < heads_; ++h) {
        const std::size_t row = first + h;
        const bool firm = code(h, choices[h], std::span(x).subspan(row * dim_, dim_), codes,
                               std::span(side.bytes).subspan(row * row_bytes_, row_bytes_),
                               std::span(decoded).subspan(row * dim_, dim_));
        side.firm[row] = firm ? 1 : 0;
      }
    });
    return side;
  }

 private:
  /// Of one row: codes, scales and minima.
  struct Codes {
    std::vector<std::uint8_t> codes;  ///< [D]
    std::vector<float> numbers;
  };

  /// The centroid of each head of one token, x [H, D].
  std::vector<Choice> choose(std::span<const float> x) const {
    std::vector<Choice> choices(heads_);
    if (!plan_.centroids) return choices;
    std::vector<float> sums(static_cast<std::size_t>(plan_.centroids->count), 0.0f);
    for (std::size_t h = 0; h < heads_; ++h) {
      add_centroid_distances(*plan_.centroids, plan_.rotation.head_index(static_cast<int>(h)),
                             x.subspan(h * dim_, dim_), sums);
      if (plan_.centroids->joint) continue;
      choices[h] = smallest(sums);
      std::fill(sums.begin(), sums.end(), 0.0f);
    }
    if (plan_.centroids->joint) std::fill(choices.begin(), choices.end(), smallest(sums));
    return choices;
  }

  /// @return  whether bytes are firm
  bool code(std::size_t head, const Choice& choice, std::span<const float> x, Codes& codes,
            std::span<std::uint8_t> bytes, std::span<float> decoded) const {
    std::vector<float> x_rot(dim_), x_hat(dim_);
    rotate_row(plan_, static_cast<int>(head), x, x_rot, choice.centroid);
    expect_finite(x_rot);
    pack(head, choice.centroid, x_rot, codes, bytes);
    if (exact_) {
      x_hat = x_rot;
      quantize_exact(x_hat);
    } else {
      codecs_[head].decode(codes.codes, codes.numbers, x_hat);
    }
    unrotate_row(plan_, static_cast<int>(head), x_hat, decoded, choice.centroid);
    if (plan_.rotation.kind == RotationKind::identity) return choice.firm;  // no sums to round
    return choice.firm && survives_probes(head, choice.centroid, x_rot, codes, bytes);
  }

  /// Packs one row into `bytes`. Unless rows are exact, `codes` then holds its codes, scales and minima.
  void pack(std::size_t head, int centroid, std::span<const float> x_rot, Codes& codes,
            std::span<std::uint8_t> bytes) const {
    if (exact_) {
      for (std::size_t j = 0; j < dim_; ++j) {
        const std::uint16_t bits = exact_bits(x_rot[j]);
        bytes[2 * j] = static_cast<std::uint8_t>(bits & 0xff);
        bytes[2 * j + 1] = static_cast<std::uint8_t>(bits >> 8);
      }
      return;
    }
    codes.numbers.resize(static_cast<std::size_t>(codecs_[head].num_numbers()));
    codecs_[head].encode(x_rot, codes.codes, codes.numbers);
    codecs_[head].pack(codes.codes, codes.numbers, centroid, std::as_writable_bytes(bytes));
  }

  bool survives_probes(std::size_t head, int centroid, std::span<const float> x_rot, Codes& codes,
                       std::span<const std::uint8_t> expected) const {
    float largest = 0.0f;
    for (const float x : x_rot) largest = std::max(largest, std::abs(x));
    const float step = largest * kProbe;
    if (!std::isfinite(largest + step)) return false;
    std::vector<std::uint8_t> bytes(expected.size());
    return all_probes(x_rot, step, [&](std::span<const float> moved) {
      pack(head, centroid, moved, codes, bytes);
      return std::equal(bytes.begin(), bytes.end(), expected.begin());
    });
  }

  const TensorPlan& plan_;
  bool exact_;
  std::size_t heads_, dim_, row_bytes_;
  std::vector<RowCodec> codecs_;
};

/// [Hq, Dv] in double over rows k [N, Hkv, D] and v [N, Hkv, Dv], rounded to float once. Without learned sinks, which
/// are no part of the cache.
std::vector<float> attend_last(const LayerGeometry& g, const GoldenTokens& tokens, std::span<const float> k,
                               std::span<const float> v) {
  const auto n = static_cast<std::size_t>(tokens.count), heads = static_cast<std::size_t>(g.num_kv_heads),
             queries = static_cast<std::size_t>(g.num_q_heads);
  const auto d = static_cast<std::size_t>(g.head_dim), dv = static_cast<std::size_t>(g.v_head_dim),
             window = static_cast<std::size_t>(g.sliding_window);
  const std::size_t first = window > 0 && n > window ? n - window : 0;
  std::vector<float> out;
  std::vector<double> weights(n), sums(dv);
  for (std::size_t hq = 0; hq < queries; ++hq) {
    const std::size_t h = hq / (queries / heads);
    double largest = -HUGE_VAL, total = 0.0;
    for (std::size_t t = first; t < n; ++t) {
      double dot = 0.0;
      for (std::size_t j = 0; j < d; ++j)
        dot += double{bf16_to_float(tokens.q[hq * d + j])} * double{k[(t * heads + h) * d + j]};
      weights[t] = g.softmax_scale * dot;
      if (g.logit_softcap > 0.0) weights[t] = g.logit_softcap * std::tanh(weights[t] / g.logit_softcap);
      largest = std::max(largest, weights[t]);
    }
    for (std::size_t t = first; t < n; ++t) total += weights[t] = std::exp(weights[t] - largest);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (std::size_t t = first; t < n; ++t)
      for (std::size_t j = 0; j < dv; ++j) sums[j] += weights[t] / total * double{v[(t * heads + h) * dv + j]};
    for (const double sum : sums) out.push_back(static_cast<float>(sum));
  }
  return out;
}

std::string side_fault(Side side, const GoldenSide& expected, const GoldenSide& found, std::int64_t heads) {
  const auto place = [&](std::size_t row) {
    return fmt::format("{} of token {} head {}", name(side), static_cast<std::int64_t>(row) / heads,
                       static_cast<std::int64_t>(row) % heads);
  };
  if (found.bytes.size() != expected.bytes.size() || found.firm.size() != expected.firm.size())
    return fmt::format("{}: another number of rows", name(side));
  const std::size_t row_size = expected.firm.empty() ? 1 : expected.bytes.size() / expected.firm.size();
  for (std::size_t i = 0; i < expected.bytes.size(); ++i)
    if (expected.bytes[i] != found.bytes[i])
      return fmt::format("{}: byte {}: expected {}, found {}", place(i / row_size), i % row_size, expected.bytes[i],
                         found.bytes[i]);
  for (std::size_t row = 0; row < expected.firm.size(); ++row)
    if (expected.firm[row] != found.firm[row])
      return fmt::format("{}: firm: expected {}, found {}", place(row), expected.firm[row], found.firm[row]);
  return "";
}

std::string output_fault(const std::vector<float>& expected, const std::vector<float>& found, std::size_t dim) {
  if (expected.size() != found.size())
    return fmt::format("output: expected {} numbers, found {}", expected.size(), found.size());
  for (std::size_t first = 0; first < expected.size(); first += dim) {
    float largest = 0.0f;
    for (std::size_t j = 0; j < dim; ++j) largest = std::max(largest, std::abs(expected[first + j]));
    for (std::size_t j = 0; j < dim; ++j)
      if (!(std::abs(expected[first + j] - found[first + j]) <= kOutputTolerance * largest))
        return fmt::format("output of query head {} channel {}: expected {}, found {}", first / dim, j,
                           expected[first + j], found[first + j]);
  }
  return "";
}

}  // namespace

bool survives_probes(const TensorPlan& plan, int kv_head, std::span<const float> x_rot, float step,
                     std::span<const std::uint8_t> bytes) {
  KVQ_ASSERT(!is_exact(plan.coder) && !plan.centroids);
  const RowCodec codec(plan, kv_head, static_cast<int>(x_rot.size()));
  return all_probes(x_rot, step,
                    [&, codes = std::vector<std::uint8_t>(x_rot.size()),
                     numbers = std::vector<float>(static_cast<std::size_t>(codec.num_numbers())),
                     found = std::vector<std::uint8_t>(bytes.size())](std::span<const float> moved) mutable {
                      codec.encode(moved, codes, numbers);
                      codec.pack(codes, numbers, 0, std::as_writable_bytes(std::span(found)));
                      return std::equal(found.begin(), found.end(), bytes.begin());
                    });
}

GoldenRows code_golden_rows(const LayerPlan& plan, GoldenTokens tokens, const ForEach& for_each) {
  const LayerGeometry& g = plan.geometry;
  const auto expect = [](std::size_t found, std::int64_t expected) {
    KVQ_ASSERT(found == static_cast<std::size_t>(expected));
  };
  expect(tokens.q.size(), std::int64_t{g.num_q_heads} * g.head_dim);
  expect(tokens.k.size(), tokens.count * g.num_kv_heads * g.head_dim);
  expect(tokens.v.size(), plan.v ? tokens.count * g.num_kv_heads * g.v_head_dim : 0);
  GoldenRows rows;
  std::vector<float> k, v;
  rows.k = SideCoder(plan.k, g.num_kv_heads, g.head_dim).run(tokens.k, k, for_each);
  if (plan.v) {
    rows.v = SideCoder(*plan.v, g.num_kv_heads, g.v_head_dim).run(tokens.v, v, for_each);
    rows.out = attend_last(g, tokens, k, v);
  }
  if (!std::all_of(rows.out.begin(), rows.out.end(), [](float x) { return std::isfinite(x); }))
    throw Error{ErrorKind::numerical, fmt::format("layer {}: attention over golden rows: NaN or Inf", plan.layer)};
  rows.tokens = std::move(tokens);
  return rows;
}

std::string golden_fault(const LayerPlan& plan, const GoldenRows& rows) {
  GoldenRows expected;
  try {
    expected = code_golden_rows(plan, rows.tokens);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::numerical) throw;
    return error.what();
  }
  if (std::string fault = side_fault(Side::k, expected.k, rows.k, plan.geometry.num_kv_heads); !fault.empty())
    return fault;
  if (std::string fault = side_fault(Side::v, expected.v, rows.v, plan.geometry.num_kv_heads); !fault.empty())
    return fault;
  return output_fault(expected.out, rows.out, static_cast<std::size_t>(plan.geometry.v_head_dim));
}

}  // namespace kvq
