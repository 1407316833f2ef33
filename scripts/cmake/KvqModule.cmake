# Compile options shared by every target, and the one way to declare a module of the library.
add_library(kvq_options INTERFACE)
target_include_directories(kvq_options INTERFACE ${PROJECT_SOURCE_DIR}/lib)
target_compile_definitions(kvq_options INTERFACE KVQ_VERSION="${PROJECT_VERSION}")
# No contraction: the codec's roundings are part of the format, so artifacts must not depend on fused operations.
target_compile_options(
  kvq_options
  INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall
    -Wextra
    -Wshadow
    -Wconversion
    -Wno-sign-conversion
    -ffp-contract=off
    $<$<BOOL:${KVQ_WERROR}>:-Werror>>
)
target_compile_options(
  kvq_options
  INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${KVQ_WERROR}>>:-Werror=all-warnings>
)
if(KVQ_SANITIZE)
  target_compile_options(
    kvq_options
    INTERFACE
      -fsanitize=address,undefined
      -fno-sanitize-recover=all
      -fno-omit-frame-pointer
      -fsanitize-ignorelist=${CMAKE_CURRENT_LIST_DIR}/sanitizers.ignore
  )
  # The standard library checks indices and empty optionals itself.
  target_compile_definitions(kvq_options INTERFACE _GLIBCXX_ASSERTIONS)
  target_link_options(kvq_options INTERFACE -fsanitize=address,undefined)
endif()

# g++ 12 reports overlaps that are not there in inlined std::string concatenation (GCC bug 105329).
target_compile_options(kvq_options INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>)

# kvq_compile_in_groups(<target> [SIZE <files>] [ALONE <file>...]) lets KVQ_UNITY compile the target in groups of files,
# or as one group without SIZE. ALONE: those that define, in an unnamed namespace, what another one of the target
# defines, too.
function(kvq_compile_in_groups target)
  cmake_parse_arguments(ARG "" "SIZE" "ALONE" ${ARGN})
  if(NOT ARG_SIZE)
    set(ARG_SIZE 0)
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${KVQ_UNITY} UNITY_BUILD_BATCH_SIZE ${ARG_SIZE})
  set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
if(KVQ_UNITY)
  # A local variable may have the name of another source's function. g++ 12 warns of more in a group than in its
  # sources: it takes them for headers, and inlines more.
  target_compile_options(
    kvq_options
    INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-shadow> $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-error>
  )
endif()

# Modules that read no files: fuzzers need not know which of their branches ran.
set(KVQ_NO_PARSERS codec compute solve)

# kvq_module(<name> SOURCES <file>... [NEEDS <module>...] [LINKS <library>...])
# NEEDS lists the modules that this module may include directly; scripts/check_layers.py checks the includes.
function(kvq_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;NEEDS;LINKS" ${ARGN})
  add_library(kvq_${name} STATIC ${ARG_SOURCES})
  add_library(kvq::${name} ALIAS kvq_${name})
  set_target_properties(kvq_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  kvq_compile_in_groups(kvq_${name})
  if(KVQ_FUZZ AND NOT name IN_LIST KVQ_NO_PARSERS)
    target_compile_options(kvq_${name} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
  target_link_libraries(kvq_${name} PUBLIC kvq_options ${ARG_LINKS})
  foreach(need IN LISTS ARG_NEEDS)
    target_link_libraries(kvq_${name} PUBLIC kvq::${need})
  endforeach()
endfunction()

# kvq_compile_fast(<target>) is for code without loops over numbers: assertions, tools, and modules of text. Optimizing
# assertions as much would take g++ a third more time, and clang with sanitizers a sixth more.
function(kvq_compile_fast target)
  target_compile_options(
    ${target}
    PRIVATE
      $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>
      $<$<AND:$<BOOL:${KVQ_SANITIZE}>,$<COMPILE_LANGUAGE:CXX>>:-O1>
  )
  # At -O1 g++ 12 does not know which alternative a std::variant holds, and reports the others as uninitialized.
  target_compile_options(
    ${target}
    PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>
  )
endfunction()

# Headers that take longer to parse than most sources that include them.
set(
  KVQ_PRECOMPILED_HEADERS
  <fmt/format.h>
  <nlohmann/json.hpp>
  <algorithm>
  <filesystem>
  <functional>
  <map>
  <memory>
  <optional>
  <span>
  <string>
  <variant>
  <vector>
)

# kvq_precompile(<module> [REUSE_FROM <other module>]) parses KVQ_PRECOMPILED_HEADERS once, or takes the other module's
# copy.
function(kvq_precompile name)
  cmake_parse_arguments(ARG "" "REUSE_FROM" "" ${ARGN})
  if(ARG_REUSE_FROM)
    target_precompile_headers(kvq_${name} REUSE_FROM kvq_${ARG_REUSE_FROM})
  else()
    target_precompile_headers(kvq_${name} PRIVATE ${KVQ_PRECOMPILED_HEADERS})
  endif()
endfunction()
