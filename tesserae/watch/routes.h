#pragma once

#include "tesserae/watch/http.h"
#include "tesserae/watch/run_folder.h"

namespace tesserae::watch {

/// What each address answers. A fixed table: nothing of an address is a path.
class Routes {
 public:
  Routes(RunFolder& run, bool allow_control) : run_(run), allow_control_(allow_control) {}

  /// GET, HEAD, and POST of /api/dial. Thread-safe.
  HttpResponse answer(const HttpRequest& request) const;
  static bool changes(const HttpRequest& request) { return request.method != "GET" && request.method != "HEAD"; }

 private:
  static HttpResponse page(const HttpRequest& request);
  HttpResponse run() const;
  HttpResponse now(const HttpRequest& request) const;
  HttpResponse timeline(const HttpRequest& request) const;
  static HttpResponse lines(const RunFolder::Lines& lines);
  HttpResponse dial(const HttpRequest& request) const;
  HttpResponse metrics() const;

  RunFolder& run_;
  bool allow_control_;
};

}  // namespace tesserae::watch
