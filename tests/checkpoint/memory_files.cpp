#include "tests/checkpoint/memory_files.h"

#include <algorithm>
#include <cerrno>

#include "tesserae/os/failure.h"

namespace tesserae::testing {
namespace {

std::shared_ptr<MemoryFiles::Node> copy_of(
    const std::shared_ptr<MemoryFiles::Node>& node,
    std::map<const MemoryFiles::Node*, std::shared_ptr<MemoryFiles::Node>>& done) {
  auto& copy = done[node.get()];
  if (copy) return copy;
  copy = std::make_shared<MemoryFiles::Node>();
  copy->directory = node->directory;
  copy->content = node->content;
  copy->lasting_content = node->lasting_content;
  for (const auto& [name, child] : node->names) copy->names[name] = copy_of(child, done);
  for (const auto& [name, child] : node->lasting_names) copy->lasting_names[name] = copy_of(child, done);
  return copy;
}

}  // namespace

class MemoryFiles::Readable : public os::ReadableFile {
 public:
  Readable(MemoryFiles& files, std::shared_ptr<Node> node) : files_(files), node_(std::move(node)) {}

  size_t read_at(uint64_t offset, std::span<char> bytes) override {
    const std::scoped_lock lock(files_.mutex_);
    const std::string& content = node_->content;
    if (offset >= content.size()) return 0;
    return content.copy(bytes.data(), bytes.size(), offset);
  }

 private:
  MemoryFiles& files_;
  std::shared_ptr<Node> node_;
};

class MemoryFiles::Writable : public os::WritableFile {
 public:
  Writable(MemoryFiles& files, std::shared_ptr<Node> node) : files_(files), node_(std::move(node)) {}

  void write(std::string_view bytes) override {
    const std::scoped_lock lock(files_.mutex_);
    node_->content += bytes;
  }
  void sync() override {
    const std::scoped_lock lock(files_.mutex_);
    node_->lasting_content = node_->content;
  }
  void close() override {}

 private:
  MemoryFiles& files_;
  std::shared_ptr<Node> node_;
};

MemoryFiles::MemoryFiles() : root_(std::make_shared<Node>()) {
  root_->directory = true;
}

MemoryFiles::MemoryFiles(const MemoryFiles& other) {
  const std::scoped_lock lock(other.mutex_);
  std::map<const Node*, std::shared_ptr<Node>> done;
  root_ = copy_of(other.root_, done);
}

std::shared_ptr<MemoryFiles::Node> MemoryFiles::find(const os::Path& path) const {
  std::shared_ptr<Node> node = root_;
  for (const os::Path& part : path.relative_path()) {
    if (part.empty() || part == ".") continue;
    const auto found = node->names.find(part.native());
    if (found == node->names.end()) return nullptr;
    node = found->second;
  }
  return node;
}

MemoryFiles::Node& MemoryFiles::directory_of(const os::Path& path, std::string_view operation) const {
  const std::shared_ptr<Node> node = find(path.parent_path());
  if (node == nullptr || !node->directory) throw os::failure("MemoryFiles", path.native(), operation, ENOENT);
  return *node;
}

void MemoryFiles::change(Node& directory, std::function<void(Names&)> apply) {
  apply(directory.names);
  directory.changes.push_back(std::move(apply));
}

std::unique_ptr<os::ReadableFile> MemoryFiles::open(const os::Path& path) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(path);
  if (node == nullptr || node->directory) throw os::failure("MemoryFiles", path.native(), "open", ENOENT);
  return std::make_unique<Readable>(*this, node);
}

std::unique_ptr<os::WritableFile> MemoryFiles::write_to(const os::Path& path, bool truncate) {
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Node> node = find(path);
  if (node == nullptr) {
    node = std::make_shared<Node>();
    change(directory_of(path, "create"), [name = path.filename().native(), node](Names& names) { names[name] = node; });
  }
  if (truncate) node->content.clear();
  return std::make_unique<Writable>(*this, node);
}

std::unique_ptr<os::WritableFile> MemoryFiles::create(const os::Path& path) {
  return write_to(path, true);
}

std::unique_ptr<os::WritableFile> MemoryFiles::append(const os::Path& path) {
  return write_to(path, false);
}

os::FileStatus MemoryFiles::status(const os::Path& path) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(path);
  if (node == nullptr) return {};
  return {node->directory ? os::FileKind::directory : os::FileKind::file, false, node->content.size()};
}

std::vector<std::string> MemoryFiles::list(const os::Path& directory) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(directory);
  if (node == nullptr || !node->directory) throw os::failure("MemoryFiles", directory.native(), "list", ENOENT);
  std::vector<std::string> names;
  for (const auto& [name, child] : node->names) names.push_back(name);
  return names;
}

void MemoryFiles::make_directory(const os::Path& path) {
  const std::scoped_lock lock(mutex_);
  if (const auto there = find(path)) {
    if (there->directory) return;
    throw os::failure("MemoryFiles", path.native(), "make_directory", EEXIST);
  }
  auto node = std::make_shared<Node>();
  node->directory = true;
  change(directory_of(path, "make_directory"),
         [name = path.filename().native(), node](Names& names) { names[name] = node; });
}

void MemoryFiles::rename(const os::Path& from, const os::Path& to) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(from);
  if (node == nullptr) throw os::failure("MemoryFiles", from.native(), "rename", ENOENT);
  if (const auto there = find(to); there != nullptr && there->directory && !there->names.empty()) {
    throw os::failure("MemoryFiles", from.native(), "rename", ENOTEMPTY);
  }
  if (from.parent_path() != to.parent_path()) throw os::failure("MemoryFiles", from.native(), "rename", EXDEV);
  change(directory_of(from, "rename"),
         [old = from.filename().native(), fresh = to.filename().native(), node](Names& names) {
           names.erase(old);
           names[fresh] = node;
         });
}

bool MemoryFiles::link(const os::Path& file, const os::Path& name) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(file);
  if (node == nullptr) throw os::failure("MemoryFiles", file.native(), "link", ENOENT);
  if (find(name) != nullptr) return false;
  change(directory_of(name, "link"), [fresh = name.filename().native(), node](Names& names) { names[fresh] = node; });
  return true;
}

void MemoryFiles::remove(const os::Path& path) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(path);
  if (node == nullptr) throw os::failure("MemoryFiles", path.native(), "remove", ENOENT);
  if (!node->names.empty()) throw os::failure("MemoryFiles", path.native(), "remove", ENOTEMPTY);
  change(directory_of(path, "remove"), [name = path.filename().native()](Names& names) { names.erase(name); });
}

void MemoryFiles::sync_directory(const os::Path& path) {
  const std::scoped_lock lock(mutex_);
  const auto node = find(path);
  if (node == nullptr) throw os::failure("MemoryFiles", path.native(), "sync_directory", ENOENT);
  node->lasting_names = node->names;
  node->changes.clear();
}

std::string& MemoryFiles::bytes(const os::Path& path) {
  const auto node = find(path);
  if (node == nullptr || node->directory) throw os::failure("MemoryFiles", path.native(), "bytes", ENOENT);
  return node->content;
}

void MemoryFiles::revert(Node& node, Unsynced unsynced, std::mt19937_64& random) {
  if (node.directory) {
    Names names = node.lasting_names;
    const size_t kept = unsynced == Unsynced::lost   ? 0
                        : unsynced == Unsynced::kept ? node.changes.size()
                                                     : random() % (node.changes.size() + 1);
    for (size_t i = 0; i < kept; ++i) node.changes[i](names);
    node.changes.clear();
    node.names = node.lasting_names = names;
    for (auto& [name, child] : names) revert(*child, unsynced, random);
    return;
  }
  std::string content = node.lasting_content;
  if (unsynced == Unsynced::kept) content = node.content;
  if (unsynced == Unsynced::mixed && node.content != node.lasting_content) {
    content = node.content.substr(0, random() % (node.content.size() + 1));
    // A length may reach the medium before the data do.
    if (random() % 2 == 0) content.resize(node.content.size(), '\0');
  }
  node.content = node.lasting_content = content;
}

void MemoryFiles::lose_power(Unsynced unsynced, uint64_t seed) {
  const std::scoped_lock lock(mutex_);
  std::mt19937_64 random(seed);
  revert(*root_, unsynced, random);
}

}  // namespace tesserae::testing
