#include "report/line_chart.h"

#include "common/stable_order.h"
#include "report/axes.h"
#include "report/svg.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvq {

namespace {

constexpr double kLabelGap = 12.0;
constexpr double kCharacter = 6.6, kStrongCharacter = 7.5;  ///< width of a character in wide fonts
constexpr std::size_t kLongestLabel = 16, kMostMarks = 16;

struct EndLabel {
  std::size_t line;
  Point end;  ///< end of the line
  double y;   ///< position of the label
};

class Drawing {
 public:
  explicit Drawing(const LineChart& chart)
      : chart_(chart),
        frame_(frame_of(chart)),
        svg_(frame_.width, frame_.height, chart.label),
        y_(scale_for(axis_values(), frame_.bottom(), frame_.top, chart.log)) {
    const std::vector<double> x = positions();
    x_ = {
        .low = x.front(),
        .high = std::max(x.back(), x.front() + 1e-9),
        .from = frame_.left + 6.0,
        .to = frame_.right() - 6.0,
    };
    if (x.size() == 1) x_.from = x_.to = (frame_.left + frame_.right()) / 2.0;
    for (const double value : x) places_.push_back(x_(value));
  }

  std::string draw() {
    draw_y_axis(svg_, frame_, y_, chart_.small ? 4 : 8);
    draw_x_places(svg_, frame_, places_, chart_.places, chart_.x_title);
    for (const ChartLine& line : chart_.lines) draw_band(line);
    for (const ChartLine& line : chart_.lines) draw_line(line);
    if (!chart_.small) draw_labels();
    return svg_.str();
  }

 private:
  static Frame frame_of(const LineChart& chart) {
    double longest = 0.0;
    for (const ChartLine& line : chart.lines)
      longest = std::max(longest, (line.strong ? kStrongCharacter : kCharacter) *
                                      static_cast<double>(std::min(num_characters(line.name), kLongestLabel)));
    const double labels = 18.0 + longest;
    if (chart.small)
      return {.width = 170.0, .height = 126.0, .left = 40.0, .top = 8.0, .plot_width = 124.0, .plot_height = 96.0};
    const double plot_height = std::max(Frame{}.plot_height, kLabelGap * static_cast<double>(chart.lines.size()));
    return {.height = plot_height + 58.0, .plot_width = 354.0 - labels, .plot_height = plot_height};
  }

  std::vector<double> axis_values() const {
    if (!chart_.scale_of.empty()) return chart_.scale_of;
    std::vector<double> all;
    for (const ChartLine& line : chart_.lines)
      for (const std::vector<double>* values : {&line.values, &line.low, &line.high})
        all.insert(all.end(), values->begin(), values->end());
    return all;
  }

  std::vector<double> positions() const {
    if (!chart_.x.empty()) return chart_.x;
    std::vector<double> x(chart_.places.size());
    std::iota(x.begin(), x.end(), 0.0);
    return x;
  }

  Point point(std::size_t place, double value) const { return {places_[place], y_(value)}; }

  void draw_band(const ChartLine& line) {
    std::vector<Point> outline;
    for (std::size_t i = 0; i < line.high.size(); ++i)
      if (y_.shows(line.high[i])) outline.push_back(point(i, line.high[i]));
    for (std::size_t i = line.low.size(); i-- > 0;)
      if (std::isfinite(line.low[i]))
        outline.push_back({places_[i], y_.shows(line.low[i]) ? y_(line.low[i]) : frame_.bottom()});
    if (!outline.empty()) svg_.polygon(outline, "band " + series_css(line.style));
  }

  void draw_line(const ChartLine& line) {
    const std::string css = series_css(line.style) + (line.strong ? " strong" : "");
    std::vector<Point> run;
    const auto end_run = [&] {
      if (run.size() > 1) svg_.polyline(run, "line " + css);
      run.clear();
    };
    for (std::size_t i = 0; i < line.values.size(); ++i) {
      if (y_.shows(line.values[i])) {
        run.push_back(point(i, line.values[i]));
      } else {
        end_run();
      }
    }
    end_run();
    if (chart_.small) return;
    // Every value has a marker with a tooltip. If a line has more than kMostMarks values, only one in `every` is
    // visible. The offset depends on the line's style, so that visible markers of different lines do not cover each
    // other.
    const std::size_t every = (line.values.size() + kMostMarks - 1) / kMostMarks;
    for (std::size_t i = 0; i < line.values.size(); ++i)
      if (y_.shows(line.values[i]))
        svg_.marker(point(i, line.values[i]), line.style,
                    ((i + static_cast<std::size_t>(line.style)) % every == 0 ? "mark " : "spot ") + css,
                    fmt::format("{}, {}: {}", line.name, chart_.places[i], html_number(line.values[i])));
  }

  /// The ends of all lines, from top to bottom; a line without values has none.
  std::vector<EndLabel> ends() const {
    std::vector<EndLabel> labels;
    for (std::size_t l = 0; l < chart_.lines.size(); ++l) {
      const std::vector<double>& values = chart_.lines[l].values;
      for (std::size_t i = values.size(); i-- > 0;) {
        if (!y_.shows(values[i])) continue;
        labels.push_back({l, point(i, values[i]), y_(values[i])});
        break;
      }
    }
    sort_stably(labels, [](const EndLabel& a, const EndLabel& b) { return a.y < b.y; });
    return labels;
  }

  /// Moves labels apart. Labels that would cover each other become a block, centered where its labels belong.
  void spread(std::vector<EndLabel>& labels) const {
    struct Block {
      std::size_t first, count;
      double sum;  ///< sum over labels of the top that the block would need to put this label where it belongs
    };
    const auto top = [&](const Block& block) {
      const auto count = static_cast<double>(block.count);
      return std::clamp(block.sum / count, frame_.top,
                        std::max(frame_.top, frame_.bottom() - kLabelGap * (count - 1.0)));
    };
    std::vector<Block> blocks;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      blocks.push_back({i, 1, labels[i].y});
      while (blocks.size() > 1) {
        const Block last = blocks.back();
        Block& before = blocks[blocks.size() - 2];
        const double length = kLabelGap * static_cast<double>(before.count);
        if (top(before) + length <= top(last)) break;
        before.sum += last.sum - static_cast<double>(last.count) * length;
        before.count += last.count;
        blocks.pop_back();
      }
    }
    for (const Block& block : blocks)
      for (std::size_t i = 0; i < block.count; ++i)
        labels[block.first + i].y = top(block) + kLabelGap * static_cast<double>(i);
  }

  void draw_labels() {
    std::vector<EndLabel> labels = ends();
    spread(labels);
    const double left = frame_.right() + 10.0;
    for (const EndLabel& label : labels) {
      const ChartLine& line = chart_.lines[label.line];
      const std::string css = series_css(line.style) + (line.strong ? " strong" : "");
      svg_.line({std::max(label.end.x + 4.0, frame_.right() - 2.0), label.end.y}, {left - 5.0, label.y},
                "leader " + css);
      svg_.marker({left, label.y}, line.style, "mark " + css);
      svg_.text({left + 7.0, label.y + 3.5}, line.strong ? "strong" : "", shortened(line.name, kLongestLabel));
    }
  }

  const LineChart& chart_;
  Frame frame_;
  Svg svg_;
  Scale y_, x_;
  std::vector<double> places_;
};

}  // namespace

std::string line_chart(const LineChart& chart) { return Drawing(chart).draw(); }

}  // namespace kvq
