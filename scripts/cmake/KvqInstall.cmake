# Installed files: libkvq_runtime, shared and static, from the same objects; headers; find_package(kvq). The library
# needs only the C library, libstdc++ and the driver: fmt is compiled in, and the CUDA runtime is linked statically.
# Kernels are built for CMAKE_CUDA_ARCHITECTURES; with "80;86;89;90;100;120" one library runs on all of them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
find_package(Threads REQUIRED)

set(
  modules
  core
  plan
  container
  codec
  artifact
  runtime
)
set(objects "")
foreach(module IN LISTS modules)
  # fmt is compiled in, so targets that link the library may use any fmt, or none.
  target_compile_definitions(kvq_${module} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:FMT_HEADER_ONLY>)
  list(APPEND objects $<TARGET_OBJECTS:kvq_${module}>)
endforeach()

list(APPEND objects $<TARGET_OBJECTS:kvq_warpgroup_kernels>) # not among the objects of a library that links it

add_library(kvq_runtime_shared SHARED ${objects})
add_library(kvq_runtime_static STATIC ${objects})
foreach(kind IN ITEMS shared static)
  set_target_properties(
    kvq_runtime_${kind}
    PROPERTIES
      OUTPUT_NAME kvq_runtime
      LINKER_LANGUAGE CXX
      ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/deploy
      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/deploy
  )
  target_include_directories(kvq_runtime_${kind} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()
# The library's version is that of its interface: KVQ_ABI_VERSION, 100 * major + minor.
file(STRINGS ${PROJECT_SOURCE_DIR}/lib/kvq/runtime.h line REGEX "^#define KVQ_ABI_VERSION")
string(REGEX REPLACE ".* ([0-9]+)" "\\1" abi "${line}")
math(EXPR major "${abi} / 100")
math(EXPR minor "${abi} % 100")
set_target_properties(
  kvq_runtime_shared
  PROPERTIES
    EXPORT_NAME runtime
    VERSION ${major}.${minor}
    SOVERSION ${major}
    LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/kvq_runtime.map
)
set_target_properties(kvq_runtime_static PROPERTIES EXPORT_NAME runtime_static)
target_link_libraries(kvq_runtime_shared PRIVATE CUDA::cudart_static Threads::Threads)
# The shared library exports only the C interface, no symbol of the libraries that are linked in.
target_link_options(
  kvq_runtime_shared
  PRIVATE -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/kvq_runtime.map -Wl,--exclude-libs,ALL -Wl,--no-undefined
)

target_link_libraries(kvq_runtime_static INTERFACE CUDA::cudart_static Threads::Threads)

# cmake --install <build> --component runtime; without --component all that is built is installed. A build of some
# targets (scripts/quickstart.sh) has no library: return() leaves out what follows, headers and package files included.
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME runtime)
install(
  CODE
    "if(NOT EXISTS \"${CMAKE_CURRENT_BINARY_DIR}/deploy/libkvq_runtime.so\")
  if(CMAKE_INSTALL_COMPONENT STREQUAL \"runtime\")
    message(FATAL_ERROR \"kvq: libkvq_runtime is not built; run: cmake --build ${PROJECT_BINARY_DIR}\")
  endif()
  message(STATUS \"kvq: left out libkvq_runtime, which cmake --build ${PROJECT_BINARY_DIR} builds\")
  return()
endif()"
)
install(TARGETS kvq_runtime_shared kvq_runtime_static EXPORT kvq-targets)
install(
  FILES ${PROJECT_SOURCE_DIR}/lib/kvq/runtime.h ${PROJECT_SOURCE_DIR}/lib/kvq/runtime.hpp
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvq
)
install(
  FILES
    ${PROJECT_SOURCE_DIR}/lib/kvq/runtime/cache_allocator.h
    ${PROJECT_SOURCE_DIR}/lib/kvq/runtime/paged_cache.h
    ${PROJECT_SOURCE_DIR}/lib/kvq/runtime/prefix_tree.h
    ${PROJECT_SOURCE_DIR}/lib/kvq/runtime/reference_pool.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvq/runtime
)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/kvq)
install(EXPORT kvq-targets NAMESPACE kvq:: DESTINATION ${package})
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/kvq-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/kvq-config.cmake
  INSTALL_DESTINATION ${package}
)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/kvq-config-version.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/kvq-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/kvq-config-version.cmake
  DESTINATION ${package}
)
if(KVQ_KERNELS STREQUAL "few")
  install(
    CODE "message(NOTICE \"kvq: this library has few kernels, none of them optimized; -DKVQ_KERNELS=all builds all\")"
    COMPONENT runtime
  )
endif()
