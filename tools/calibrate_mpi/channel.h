#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// The few messages of MPI that a run of several processes needs. Only this folder knows MPI.
namespace kvq {

/// The processes of the run, from MPI_Init to MPI_Finalize.
class Channel {
 public:
  Channel(int* argc, char*** argv);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  /// Processes of the run on this machine.
  int ranks_here() const { return ranks_here_; }

  /// Gives all ranks the text of rank 0.
  std::string broadcast(std::string text) const;

  void send(int to, const std::string& text) const;
  void send(int to, const std::vector<double>& numbers) const;
  void send(int to, const std::vector<std::int64_t>& numbers) const;
  void send(int to, const std::uint8_t* flags, std::int64_t count) const;
  std::string receive_text(int from) const;
  /// @param numbers  as many as the sender sends
  void receive(int from, std::vector<double>& numbers) const;
  void receive(int from, std::vector<std::int64_t>& numbers) const;
  void receive(int from, std::vector<std::uint8_t>& flags) const;

  /// Ends all processes of the run.
  [[noreturn]] void abort(int code) const;

 private:
  int rank_ = 0, ranks_ = 1, ranks_here_ = 1;
};

}  // namespace kvq
