#include "tesserae/os/faulty_files.h"

#include "tesserae/os/failure.h"

namespace tesserae::os {

class FaultyFiles::Readable : public ReadableFile {
 public:
  Readable(FaultyFiles& twin, Path path, std::unique_ptr<ReadableFile> under)
      : twin_(twin), path_(std::move(path)), under_(std::move(under)) {}

  size_t read_at(uint64_t offset, std::span<char> bytes) override {
    twin_.step("read_at", path_);
    return under_->read_at(offset, bytes);
  }
  void forget_cached() override {
    twin_.step("forget_cached", path_);
    under_->forget_cached();
  }

 private:
  FaultyFiles& twin_;
  Path path_;
  std::unique_ptr<ReadableFile> under_;
};

class FaultyFiles::Writable : public WritableFile {
 public:
  Writable(FaultyFiles& twin, Path path, std::unique_ptr<WritableFile> under)
      : twin_(twin), path_(std::move(path)), under_(std::move(under)) {}

  void write(std::string_view bytes) override {
    if (const Fault* fault = twin_.count("write", path_)) {
      under_->write(bytes.substr(0, static_cast<size_t>(fault->written * static_cast<double>(bytes.size()))));
      throw failure("FaultyFiles", path_.native(), "write", fault->error);
    }
    under_->write(bytes);
  }

  void sync() override {
    twin_.step("sync", path_);
    under_->sync();
  }

  void close() override {
    twin_.step("close", path_);
    under_->close();
  }

 private:
  FaultyFiles& twin_;
  Path path_;
  std::unique_ptr<WritableFile> under_;
};

void FaultyFiles::fail_at(int number, Fault fault) {
  const std::scoped_lock lock(mutex_);
  failing_ = number;
  fault_ = fault;
  log_.clear();
}

int FaultyFiles::operations() const {
  const std::scoped_lock lock(mutex_);
  return static_cast<int>(log_.size());
}

std::vector<std::string> FaultyFiles::log() const {
  const std::scoped_lock lock(mutex_);
  return log_;
}

const FaultyFiles::Fault* FaultyFiles::count(std::string_view operation, const Path& path) {
  const std::scoped_lock lock(mutex_);
  log_.push_back(cat(operation, " ", path.native()));
  const int number = static_cast<int>(log_.size());
  const bool fails = failing_ > 0 && (fault_.lasting ? number >= failing_ : number == failing_);
  return fails ? &fault_ : nullptr;
}

void FaultyFiles::step(std::string_view operation, const Path& path) {
  if (const Fault* fault = count(operation, path)) {
    throw failure("FaultyFiles", path.native(), operation, fault->error);
  }
}

std::unique_ptr<ReadableFile> FaultyFiles::open(const Path& path) {
  step("open", path);
  return std::make_unique<Readable>(*this, path, under_.open(path));
}

std::unique_ptr<WritableFile> FaultyFiles::create(const Path& path) {
  step("create", path);
  return std::make_unique<Writable>(*this, path, under_.create(path));
}

std::unique_ptr<WritableFile> FaultyFiles::append(const Path& path) {
  step("append", path);
  return std::make_unique<Writable>(*this, path, under_.append(path));
}

FileStatus FaultyFiles::status(const Path& path) {
  step("status", path);
  return under_.status(path);
}

std::vector<std::string> FaultyFiles::list(const Path& directory) {
  step("list", directory);
  return under_.list(directory);
}

void FaultyFiles::make_directory(const Path& path) {
  step("make_directory", path);
  under_.make_directory(path);
}

void FaultyFiles::rename(const Path& from, const Path& to) {
  step("rename", from);
  under_.rename(from, to);
}

bool FaultyFiles::link(const Path& file, const Path& name) {
  step("link", file);
  return under_.link(file, name);
}

void FaultyFiles::remove(const Path& path) {
  step("remove", path);
  under_.remove(path);
}

void FaultyFiles::sync_directory(const Path& path) {
  step("sync_directory", path);
  under_.sync_directory(path);
}

}  // namespace tesserae::os
