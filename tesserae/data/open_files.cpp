#include "tesserae/data/open_files.h"

namespace tesserae::data {

os::ReadableFile& OpenFiles::get(size_t file, const os::Path& path) {
  if (const auto found = where_.find(file); found != where_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second);
    return *found->second->second;
  }
  recent_.emplace_front(file, os::files().open(path));
  where_[file] = recent_.begin();
  if (recent_.size() > capacity_) {
    where_.erase(recent_.back().first);
    recent_.pop_back();
  }
  return *recent_.front().second;
}

}  // namespace tesserae::data
