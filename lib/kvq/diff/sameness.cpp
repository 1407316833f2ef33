#include <kvq/container/json.h>
#include <kvq/core/text.h>
#include <kvq/diff/sameness.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>
#include <span>

namespace kvq {

namespace {

/// Splits "layers/3/k/error/after" or "layers.3.k.rotation" into what it is and where: "error/after", "layer 3 k".
std::pair<std::string, std::string> split_place(const std::string& path) {
  static const std::regex layered(R"(layers[./]([0-9]{1,9})[./](k|v|golden)[./]([^ ]{1,200}))");
  std::smatch parts;
  if (!std::regex_match(path, parts, layered)) return {path, ""};
  return {parts[3].str(), fmt::format("layer {} {}", parts[1].str(), parts[2].str())};
}

/// Collects differences of two files.
class Comparer {
 public:
  void differ(const std::string& what) {
    if (result_.reason.empty()) result_.reason = printable(what, 70);
  }

  /// @param difference  relative
  /// @param allowed     what rounding explains
  void number(const std::string& path, double difference, double allowed) {
    if (difference == 0.0) return;
    const auto [what, where] = split_place(path);
    NumberDifference& largest = numbers_[what];
    if (!(difference <= largest.difference)) largest = {what, where, difference};
    if (!(difference <= allowed)) differ(fmt::format("{}: a number differs by {:.2g}", path, difference));
  }

  void golden_rows(std::int64_t count) { result_.golden_rows += count; }

  Sameness result(bool identical) {
    for (auto& [what, number] : numbers_) result_.numbers.push_back(std::move(number));
    // NaN counts as the largest difference.
    const auto size = [](const NumberDifference& x) { return std::isnan(x.difference) ? HUGE_VAL : x.difference; };
    std::sort(result_.numbers.begin(), result_.numbers.end(),
              [&](const auto& a, const auto& b) { return size(a) != size(b) ? size(a) > size(b) : a.what < b.what; });
    result_.verdict = identical                ? SamenessVerdict::identical
                      : result_.reason.empty() ? SamenessVerdict::equal_but_for_rounding
                                               : SamenessVerdict::different;
    return std::move(result_);
  }

 private:
  Sameness result_;
  std::map<std::string, NumberDifference> numbers_;
};

double relative(double a, double b) {
  const double size = std::max(std::abs(a), std::abs(b));
  return size == 0.0 ? 0.0 : std::abs(a - b) / size;
}

void compare_json(const Json& before, const Json& after, const std::string& path, Comparer& found) {
  const auto below = [&](const std::string& key) { return path.empty() ? key : path + "/" + key; };
  if (before.is_object() && after.is_object()) {
    for (const auto& [key, value] : before.items())
      if (!after.contains(key)) found.differ(below(key) + ": only in the old file");
    for (const auto& [key, value] : after.items()) {
      if (!before.contains(key))
        found.differ(below(key) + ": only in the new file");
      else
        compare_json(before.at(key), value, below(key), found);
    }
  } else if (before.is_array() && after.is_array() && before.size() == after.size()) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      // The numbers of one array are one kind of number. Entries of `layers` are named by their layer.
      const bool of_numbers = before[i].is_number() && after[i].is_number();
      const Json& name = before[i].is_object() && before[i].contains("layer") ? before[i].at("layer") : Json(i);
      compare_json(before[i], after[i], of_numbers ? path : below(name.dump()), found);
    }
  } else if (before.is_number_float() && after.is_number_float()) {
    found.number(path, relative(before.get<double>(), after.get<double>()), kManifestRounding);
  } else if (before != after) {
    found.differ(fmt::format("{}: {} -> {}", path, printable(before.dump(), 40), printable(after.dump(), 40)));
  }
}

template <typename T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name) {
  return file.read<T>(name, file.info(name).shape);
}

/// Largest difference of two F32 tensors over their largest magnitude.
double tensor_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0.0, worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max({largest, std::abs(double{a[i]}), std::abs(double{b[i]})});
    worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  }
  return worst == 0.0 ? 0.0 : worst / largest;
}

bool ends_with_any(const std::string& name, std::initializer_list<std::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return name.ends_with(end); });
}

/// Marks golden rows of one tensor whose bytes, or whose flags, differ. @param marks  [N * Hkv]
void mark_rows(std::span<const std::byte> a, std::span<const std::byte> b, std::vector<bool>& marks) {
  const std::size_t size = marks.empty() ? 0 : a.size() / marks.size();
  for (std::size_t row = 0; row < marks.size(); ++row)
    if (!std::equal(a.begin() + static_cast<std::ptrdiff_t>(row * size),
                    a.begin() + static_cast<std::ptrdiff_t>((row + 1) * size),
                    b.begin() + static_cast<std::ptrdiff_t>(row * size)))
      marks[row] = true;
}

void compare_tensors(const SafetensorsFile& before, const SafetensorsFile& after, Comparer& found) {
  std::map<std::string, std::vector<bool>> golden;  // rows that differ, by tensor name without "_bytes" or "_firm"
  for (const auto& [name, info] : after.tensors()) {
    if (!before.has(name)) {
      found.differ(name + ": only in the new file");
      continue;
    }
    const TensorInfo& other = before.info(name);
    const auto a = before.bytes(name), b = after.bytes(name);
    if (other.dtype != info.dtype || other.shape != info.shape) {
      found.differ(name + ": another type or shape");
    } else if (std::ranges::equal(a, b)) {
      continue;
    } else if (name.find(".golden.") != name.npos && ends_with_any(name, {"_bytes", "_firm"})) {
      std::vector<bool>& marks = golden[name.substr(0, name.rfind('_'))];
      marks.resize(static_cast<std::size_t>(info.shape[0] * info.shape[1]));
      mark_rows(a, b, marks);
    } else if (name.ends_with(".golden.out")) {
      continue;  // follows from the rows
    } else if (info.dtype == DType::f32) {
      found.number(name, tensor_difference(values_of<float>(before, name), values_of<float>(after, name)),
                   kTensorRounding);
    } else {
      found.differ(name + ": other numbers");
    }
  }
  for (const auto& [name, info] : before.tensors())
    if (!after.has(name)) found.differ(name + ": only in the old file");
  for (const auto& [name, marks] : golden) found.golden_rows(std::count(marks.begin(), marks.end(), true));
}

Json manifest_of(const SafetensorsFile& file) { return parse_json(file.metadata().at("kvq.manifest"), file.name()); }

}  // namespace

const char* to_string(SamenessVerdict verdict) {
  switch (verdict) {
    case SamenessVerdict::identical: return "identical";
    case SamenessVerdict::equal_but_for_rounding: return "equal_but_for_rounding";
    case SamenessVerdict::different: return "different";
  }
  return "?";
}

Sameness compare_files(const SafetensorsFile& before, const SafetensorsFile& after) {
  Comparer found;
  compare_json(manifest_of(before), manifest_of(after), "", found);
  compare_tensors(before, after, found);
  return found.result(content_hash(before, before.metadata().at("kvq.manifest")) ==
                      content_hash(after, after.metadata().at("kvq.manifest")));
}

}  // namespace kvq
