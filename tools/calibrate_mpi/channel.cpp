#include "calibrate_mpi/channel.h"

#include <kvq/core/error.h>

#include <mpi.h>

#include <cstdlib>
#include <limits>

namespace kvq {

namespace {

constexpr int kTag = 1;

int count_of(std::size_t size) {
  KVQ_ASSERT(size <= static_cast<std::size_t>(std::numeric_limits<int>::max()));
  return static_cast<int>(size);
}

}  // namespace

// MPI's default is to end all processes at an error, so no call's result is looked at.
Channel::Channel(int* argc, char*** argv) {
  int provided = 0;
  MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  MPI_Comm here;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
  MPI_Comm_size(here, &ranks_here_);
  MPI_Comm_free(&here);
}

Channel::~Channel() { MPI_Finalize(); }

std::string Channel::broadcast(std::string text) const {
  int size = count_of(text.size());
  MPI_Bcast(&size, 1, MPI_INT, 0, MPI_COMM_WORLD);
  text.resize(static_cast<std::size_t>(size));
  MPI_Bcast(text.data(), size, MPI_CHAR, 0, MPI_COMM_WORLD);
  return text;
}

void Channel::send(int to, const std::string& text) const {
  MPI_Send(text.data(), count_of(text.size()), MPI_CHAR, to, kTag, MPI_COMM_WORLD);
}
void Channel::send(int to, const std::vector<double>& numbers) const {
  MPI_Send(numbers.data(), count_of(numbers.size()), MPI_DOUBLE, to, kTag, MPI_COMM_WORLD);
}
void Channel::send(int to, const std::vector<std::int64_t>& numbers) const {
  MPI_Send(numbers.data(), count_of(numbers.size()), MPI_INT64_T, to, kTag, MPI_COMM_WORLD);
}
void Channel::send(int to, const std::uint8_t* flags, std::int64_t count) const {
  MPI_Send(flags, count_of(static_cast<std::size_t>(count)), MPI_UINT8_T, to, kTag, MPI_COMM_WORLD);
}

std::string Channel::receive_text(int from) const {
  MPI_Status status;
  MPI_Probe(from, kTag, MPI_COMM_WORLD, &status);
  int size = 0;
  MPI_Get_count(&status, MPI_CHAR, &size);
  std::string text(static_cast<std::size_t>(size), '\0');
  MPI_Recv(text.data(), size, MPI_CHAR, from, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  return text;
}
void Channel::receive(int from, std::vector<double>& numbers) const {
  MPI_Recv(numbers.data(), count_of(numbers.size()), MPI_DOUBLE, from, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
void Channel::receive(int from, std::vector<std::int64_t>& numbers) const {
  MPI_Recv(numbers.data(), count_of(numbers.size()), MPI_INT64_T, from, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
void Channel::receive(int from, std::vector<std::uint8_t>& flags) const {
  MPI_Recv(flags.data(), count_of(flags.size()), MPI_UINT8_T, from, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

void Channel::abort(int code) const {
  MPI_Abort(MPI_COMM_WORLD, code);
  std::abort();
}

}  // namespace kvq
