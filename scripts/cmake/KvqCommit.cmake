# KVQ_COMMIT: the short hash of the sources' commit, for --version; empty if unknown.
# In a checkout git gives the commit, and CMake configures again when HEAD moves. In an archive the commit is in
# .git_archival.txt, which git fills in.
set(KVQ_COMMIT "")
find_package(Git QUIET)
if(GIT_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/.git)
  execute_process(
    COMMAND ${GIT_EXECUTABLE} rev-parse --short=9 HEAD
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE KVQ_COMMIT
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
    RESULT_VARIABLE result
  )
  if(NOT result EQUAL 0)
    set(KVQ_COMMIT "")
  endif()
  execute_process(
    COMMAND ${GIT_EXECUTABLE} rev-parse --path-format=absolute --git-path logs/HEAD
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE log
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
  )
  if(EXISTS "${log}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${log}")
  endif()
elseif(EXISTS ${PROJECT_SOURCE_DIR}/.git_archival.txt)
  file(STRINGS ${PROJECT_SOURCE_DIR}/.git_archival.txt line REGEX "^commit: [0-9a-f]+$")
  if(line)
    string(REGEX REPLACE "^commit: (.........).*$" "\\1" KVQ_COMMIT "${line}")
  endif()
endif()
