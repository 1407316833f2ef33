#pragma once

#include <kvq/methods/method.h>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// All options, each once, in the order of --help: those of every method around those of each method of the registry.
const std::vector<OptionSpec>& option_table();

/// Options that a method has, in the order of the table.
std::vector<OptionSpec> options_of(const Method& method);

/// The method's defaults, overridden by what the user typed.
/// @throws Error{usage} for a value outside its range or list, for an option that the method lacks, and for options
/// that
///   contradict each other
Options resolve_options(const Method& method, const GivenOptions& given);

/// Refuses a flag that the method lacks. @param has  whether a method of the registry has the flag
/// @throws Error{usage} naming the methods that have the flag
[[noreturn]] void refuse_flag(const std::string& flag, const Method& method,
                              const std::function<bool(const Method&)>& has);

/// Refuses values outside their ranges, and options that contradict each other.
/// @param flag_of  names the flags of a side in errors
/// @throws Error{usage}
void check_options(const Method& method, const Options& options, const SideFlag& flag_of = own_side_flag);
/// The same for a method of the registry.
void check_options(const Options& options);

/// For the manifest: every option that decides, defaults included.
Json options_to_json(const Method& method, const Options& options);
/// The same for a method of the registry.
Json options_to_json(const Options& options);

/// The options of a manifest that its method and coders use, for people. Version 1.0 states some options of other
/// methods, clip ratios of coders that take none, and group sizes of 0; they are left out here. All options of a method
/// that is not in the registry.
Json used_options(const std::string& method, Json options);

}  // namespace kvq
