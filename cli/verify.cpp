#include "tesserae/checkpoint/verify.h"

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/checkpoints.h"
#include "cli/verbs.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/terminal.h"

namespace tesserae::cli {
namespace {

struct VerifyArguments {
  std::string path;
  bool quiet = false;
};

/// A line that is drawn anew, where a person looks.
class LiveLine {
 public:
  LiveLine(std::string what, uint64_t total) : what_(std::move(what)), total_(total) {}
  ~LiveLine() {
    if (drawn_) std::fprintf(stderr, "\r\033[K");
  }
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  void update(uint64_t bytes) {
    const os::TimePoint now = os::now();
    if (!terminal_ || (drawn_ && now - last_ < std::chrono::milliseconds(100))) return;
    std::fprintf(stderr, "\r\033[K%s: %s of %s", what_.c_str(), readable_bytes(bytes).c_str(),
                 readable_bytes(total_).c_str());
    drawn_ = true;
    last_ = now;
  }

 private:
  std::string what_;
  uint64_t total_;
  const bool terminal_ = os::is_terminal(os::Stream::errors);
  bool drawn_ = false;
  os::TimePoint last_;
};

/// For the progress only: what is wrong is found by verify().
uint64_t size_of(const os::Path& path) {
  try {
    return checkpoint::Checkpoint::open(path).manifest().bytes();
  } catch (const Error&) {
    return 0;
  }
}

/// True if there is no fault.
bool check(const os::Path& path, bool quiet) {
  const os::TimePoint begin = os::now();
  checkpoint::VerifyResult result;
  {
    LiveLine line(path.native(), size_of(path));
    result = checkpoint::verify(path, [&line](uint64_t bytes) { line.update(bytes); });
  }
  for (const checkpoint::Fault& fault : result.faults) std::printf("%s\n", fault.text().c_str());
  const double seconds = std::chrono::duration<double>(os::now() - begin).count();
  if (!quiet || !result.faults.empty()) {
    std::printf("%s: %s, %d files, %s in %.1f s\n", path.c_str(),
                result.faults.empty() ? "good" : cat(result.faults.size(), " faults").c_str(), result.files,
                readable_bytes(result.bytes).c_str(), seconds);
  }
  return result.faults.empty();
}

int run_verify(const VerifyArguments& arguments) {
  bool good = true;
  for (const os::Path& path : checkpoints_at(arguments.path)) good = check(path, arguments.quiet) && good;
  return good ? 0 : exit_failure;
}

}  // namespace

void add_verify(CLI::App& program, int& status) {
  auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* verb = program.add_subcommand("verify", "Check every byte of checkpoints against their checksums");
  verb->add_option("DIR", arguments->path, "A checkpoint, a folder of checkpoints or a run folder")
      ->required()
      ->check(CLI::ExistingDirectory);
  verb->add_flag("-q,--quiet", arguments->quiet, "Print faults only");
  verb->footer(
      "A line for each fault, with file, tensor and offset, then one for each checkpoint.\n"
      "Exit status: 0 all bytes are what was written; 1 some are not, or could not be read.");
  verb->callback([arguments, &status] { status = run_verify(*arguments); });
}

}  // namespace tesserae::cli
