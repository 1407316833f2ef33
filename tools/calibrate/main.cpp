#include "calibrate/collect.h"
#include "calibrate/program.h"
#include "common/cli.h"
#include "common/describe.h"

int main(int argc, char** argv) {
  CLI::App app;
  kvq::CalibrateFlags flags;
  kvq::describe(app, kvq::calibrate_text());
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-calibrate", app, argc, argv,
                       [&] { return kvq::calibrate(flags, kvq::collect_with_progress); });
}
