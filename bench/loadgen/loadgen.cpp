// An HTTP load generator for one core, and a trivial server to measure the generator against.
//
//   loadgen load  --port P [--connections N] [--seconds S] [--warmup S] [--rate R] [--quickack]
//                 --path /v1/... --body FILE | --bodies FILE [--requests N]
//                 [--vocabulary FILE --seed S] [--tokens N]
//   loadgen serve --port P [--chunks N] [--bytes B] | --openai
//
// `load` keeps N keep-alive connections busy (closed loop) or starts R requests a second (open
// loop), reads every answer to its end, and prints one JSON object: requests, events (server-sent
// events), bytes, errors, and quantiles of latency and of the time to the first body byte. `--bodies`
// has one body a line, sent in turn; with `--requests` it ends after so many answers and not by time.
// With `--vocabulary`, a file of one word a line, each request has another text: in the body,
// `<<own N>>` stands for N words drawn anew, `<<shared N G>>` for one of G texts of N words. With
// `--tokens` it checks each answer: status 200, `"completion_tokens": N`, and `[DONE]` if it is a
// stream; others count as wrong. The time to the first byte is then that to the first text.
// `serve` answers everything at once with ready-made bytes: N chunks of B bytes, or one body if N
// is 0. With `--openai` it answers as an OpenAI server does, with as many tokens as were asked for.
//
// Single-threaded epoll; no allocation per event once the buffers have grown.

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void die(const std::string& what) {
  fprintf(stderr, "loadgen: %s: %s\n", what.c_str(), strerror(errno));
  exit(2);
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

double cpu_seconds() {
  rusage u;
  getrusage(RUSAGE_SELF, &u);
  return u.ru_utime.tv_sec + u.ru_stime.tv_sec +
         (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

// ---------------------------------------------------------------- options

struct Options {
  std::map<std::string, std::string> values;

  Options(int argc, char** argv) {
    for (int i = 2; i < argc; ++i) {
      std::string name = argv[i];
      if (name.rfind("--", 0) != 0) die("unexpected argument " + name);
      bool has_value = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
      values[name.substr(2)] = has_value ? argv[++i] : "1";
    }
  }
  std::string text(const std::string& name, const std::string& fallback) const {
    auto it = values.find(name);
    return it == values.end() ? fallback : it->second;
  }
  double number(const std::string& name, double fallback) const {
    auto it = values.find(name);
    return it == values.end() ? fallback : atof(it->second.c_str());
  }
};

// ---------------------------------------------------------------- reading answers

// Finds the end of one HTTP response in a stream of bytes and counts its events.
class ResponseReader {
 public:
  long events = 0;
  int status = 0;
  bool started_body = false;
  bool keeps_tail = false;
  bool saw_text = false;

  // The number after this name in the last bytes of the body; -1: there is none.
  long number_of(const char* name) const {
    size_t at = tail_.rfind(name);
    if (at == std::string::npos) return -1;
    at += strlen(name);
    while (at < tail_.size() && (tail_[at] == ' ' || tail_[at] == ':')) ++at;
    return at < tail_.size() && isdigit(tail_[at]) ? atol(tail_.c_str() + at) : -1;
  }
  bool is_whole() const { return !stream_ || tail_.find("data: [DONE]") != std::string::npos; }

  // Consumes bytes of the current response; returns how many. `done()` says whether it is whole.
  size_t feed(const char* data, size_t size) {
    size_t used = 0;
    while (used < size && !done_) {
      switch (state_) {
        case State::head: used += feed_head(data + used, size - used); break;
        case State::body: used += feed_body(data + used, size - used); break;
        case State::chunk_size: used += feed_chunk_size(data + used, size - used); break;
        case State::chunk_end: used += feed_chunk_end(data + used, size - used); break;
      }
    }
    return used;
  }
  bool done() const { return done_; }
  long events_of_answer() const { return events - events_before_; }
  void reset() {
    state_ = State::head;
    head_.clear();
    line_.clear();
    left_ = 0;
    chunked_ = stream_ = last_ = done_ = started_body = saw_text = false;
    events_before_ = events;
    newline_ = false;
    status = 0;
    tail_.clear();
  }

 private:
  enum class State { head, body, chunk_size, chunk_end };
  State state_ = State::head;
  std::string head_, line_, tail_;
  size_t left_ = 0;
  long events_before_ = 0;
  bool chunked_ = false, stream_ = false, last_ = false, done_ = false, newline_ = false;

  size_t feed_head(const char* data, size_t size) {
    size_t before = head_.size();
    head_.append(data, size);
    size_t end = head_.find("\r\n\r\n", before > 3 ? before - 3 : 0);
    if (end == std::string::npos) return size;
    size_t used = end + 4 - before;
    head_.resize(end + 4);
    status = head_.size() > 12 ? atoi(head_.c_str() + 9) : 0;
    std::string lower = head_;
    std::transform(lower.begin(), lower.end(), lower.begin(), ::tolower);
    stream_ = lower.find("text/event-stream") != std::string::npos;
    size_t at = lower.find("\r\ncontent-length:");
    if (at != std::string::npos) {
      left_ = strtoul(lower.c_str() + at + 17, nullptr, 10);
      state_ = State::body;
      started_body = true;
      done_ = left_ == 0;
    } else {
      chunked_ = true;
      state_ = State::chunk_size;
    }
    return used;
  }
  size_t feed_body(const char* data, size_t size) {
    size_t used = std::min(size, left_);
    started_body = true;
    count_events(data, used);
    if (keeps_tail) keep(data, used);
    left_ -= used;
    if (left_ == 0) {
      if (chunked_) state_ = State::chunk_end; else done_ = true;
    }
    return used;
  }
  size_t feed_chunk_size(const char* data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      if (data[i] != '\n') { line_.push_back(data[i]); continue; }
      left_ = strtoul(line_.c_str(), nullptr, 16);
      line_.clear();
      last_ = left_ == 0;
      state_ = last_ ? State::chunk_end : State::body;
      return i + 1;
    }
    return size;
  }
  size_t feed_chunk_end(const char* data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      if (data[i] != '\n') continue;
      if (last_) done_ = true; else state_ = State::chunk_size;
      return i + 1;
    }
    return size;
  }
  void keep(const char* data, size_t size) {
    tail_.append(data, size);
    if (!saw_text) find_text();
    if (tail_.size() > 4 * kTail) tail_.erase(0, tail_.size() - kTail);
  }
  // A first event may have the role and an empty text, so the text itself is looked for.
  void find_text() {
    for (size_t at = tail_.find(kContent); at != std::string::npos; at = tail_.find(kContent, at)) {
      at += strlen(kContent);
      size_t quote = at + (at < tail_.size() && tail_[at] == ' ');
      if (quote + 1 >= tail_.size()) return;
      if (tail_[quote] == '"' && tail_[quote + 1] != '"') { saw_text = true; return; }
    }
  }
  static constexpr size_t kTail = 4096;
  static constexpr const char* kContent = "\"content\":";

  void count_events(const char* data, size_t size) {
    const char* end = data + size;
    const char* at = data;
    while (at < end) {
      if (newline_ && *at == '\n') ++events;
      const char* next = static_cast<const char*>(memchr(at, '\n', end - at));
      if (next == nullptr) { newline_ = false; return; }
      newline_ = true;
      at = next + 1;
      if (at < end && *at != '\n') newline_ = false;
    }
  }
};

struct Connection {
  int fd = -1;
  bool busy = false;
  bool seen_first = false;
  double started = 0;
  float first = 0;
  const std::string* request = nullptr;
  std::string own;
  size_t sent = 0;
  ResponseReader reader;
};

double quantile(std::vector<float>& sorted, double q) {
  return sorted.empty() ? 0 : sorted[std::min(sorted.size() - 1, size_t(q * sorted.size()))];
}

std::string quantiles(std::vector<float>& values) {
  std::sort(values.begin(), values.end());
  char text[128];
  snprintf(text, sizeof text, "{\"p50\": %.6f, \"p90\": %.6f, \"p99\": %.6f}",
           quantile(values, .5), quantile(values, .9), quantile(values, .99));
  return text;
}

// ---------------------------------------------------------------- texts

// Fills a body's places for words. The same seed gives the same texts in the same order.
class Texts {
 public:
  void read(const std::string& path, uint64_t seed) {
    std::ifstream file(path);
    for (std::string word; std::getline(file, word);) words_.push_back(word);
    if (words_.empty()) die("no word in " + path);
    state_ = seed * 0x9E3779B97F4A7C15ull + 1;
  }
  bool empty() const { return words_.empty(); }

  void fill(const std::string& form, std::string& out) {
    size_t at = 0;
    for (;;) {
      size_t from = form.find("<<", at);
      if (from == std::string::npos) break;
      size_t to = form.find(">>", from);
      out.append(form, at, from - at);
      place(form.substr(from + 2, to - from - 2), out);
      at = to + 2;
    }
    out.append(form, at, std::string::npos);
  }

 private:
  std::vector<std::string> words_;
  std::map<std::string, std::vector<std::string>> shared_;
  uint64_t state_ = 1;

  static uint64_t next(uint64_t& state) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1Dull;
  }
  void add(size_t count, uint64_t& state, std::string& out) {
    for (size_t i = 0; i < count; ++i) {
      if (i) out.push_back(' ');
      out += words_[(next(state) >> 33) % words_.size()];
    }
  }
  void place(const std::string& what, std::string& out) {
    std::istringstream parts(what);
    std::string kind;
    size_t count = 0, groups = 1;
    parts >> kind >> count >> groups;
    if (kind == "own") { add(count, state_, out); return; }
    auto& texts = shared_[what];
    uint64_t fixed = 0xD1B54A32D192ED03ull;
    while (texts.size() < groups) { texts.emplace_back(); add(count, fixed, texts.back()); }
    out += texts[(next(state_) >> 33) % groups];
  }
};

// ---------------------------------------------------------------- load

class Load {
 public:
  explicit Load(const Options& options)
      : host_(options.text("host", "127.0.0.1")),
        port_(int(options.number("port", 0))),
        seconds_(options.number("seconds", 3)),
        warmup_(options.number("warmup", 1)),
        rate_(options.number("rate", 0)),
        quickack_(options.number("quickack", 0) != 0),
        connections_(size_t(options.number("connections", 16))) {
    most_ = long(options.number("requests", 0));
    tokens_ = long(options.number("tokens", -1));
    for (auto& c : connections_) c.reader.keeps_tail = tokens_ >= 0;
    std::string vocabulary = options.text("vocabulary", "");
    if (!vocabulary.empty()) texts_.read(vocabulary, uint64_t(options.number("seed", 1)));
    std::string path = options.text("path", "/"), many = options.text("bodies", "");
    std::ifstream file(many.empty() ? options.text("body", "") : many, std::ios::binary);
    if (!many.empty()) {
      for (std::string line; std::getline(file, line);) add(path, line);
      if (whole_.empty()) die("no body in " + many);
      return;
    }
    std::stringstream body;
    body << file.rdbuf();
    path_ = path;
    if (texts_.empty()) add(path, body.str()); else form_ = body.str();
  }

  int run() {
    poll_ = epoll_create1(0);
    // Each asks as soon as it is there: among thousands a server may give up on those that wait.
    for (auto& c : connections_) {
      open(c);
      if (rate_ == 0) start(c);
    }
    begin_ = now();
    double measure_from = begin_ + warmup_, end = measure_from + seconds_;
    double next = begin_;
    double cpu = 0;
    std::vector<epoll_event> ready(256);
    for (;;) {
      double t = now();
      if (!measuring_ && t >= measure_from) {
        measuring_ = true;
        measure_begin_ = t;
        cpu = cpu_seconds();
        events_before_ = total_events();
        requests_ = errors_ = wrong_ = missed_ = 0;
        prompt_tokens_ = answer_events_ = 0;
        bytes_ = 0;
        latency_.clear();
        first_.clear();
      }
      if (t >= end || (most_ && requests_ + errors_ + wrong_ >= most_)) break;
      if (rate_ > 0) {
        while (next <= t) { start_idle(next); next += 1 / rate_; }
      }
      double until = std::min(end, measuring_ ? end : measure_from);
      if (rate_ > 0) until = std::min(until, next);
      int wait = std::max(0, int((until - t) * 1000));
      int n = epoll_wait(poll_, ready.data(), int(ready.size()), wait);
      for (int i = 0; i < n; ++i) on_ready(connections_[ready[i].data.u32]);
    }
    report(now() - measure_begin_, cpu_seconds() - cpu);
    return 0;
  }

 private:
  std::string host_;
  int port_;
  double seconds_, warmup_, rate_;
  bool quickack_;
  std::vector<Connection> connections_;
  std::vector<std::string> whole_;
  Texts texts_;
  std::string path_, form_, text_;
  long tokens_ = -1, wrong_ = 0, finished_ = 0, answer_events_ = 0;
  long long prompt_tokens_ = 0;
  size_t next_body_ = 0;
  long begun_ = 0, most_ = 0;
  int poll_ = -1;
  double begin_ = 0, measure_begin_ = 0;
  bool measuring_ = false;
  long requests_ = 0, errors_ = 0, events_before_ = 0, missed_ = 0;
  long long bytes_ = 0;
  std::vector<float> latency_, first_;
  char buffer_[1 << 16];

  void add(const std::string& path, const std::string& content) {
    whole_.push_back(head(path, content.size()) + content);
  }
  std::string head(const std::string& path, size_t size) const {
    return "POST " + path + " HTTP/1.1\r\nHost: " + host_ +
           "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(size) +
           "\r\n\r\n";
  }

  long total_events() const {
    long sum = 0;
    for (auto& c : connections_) sum += c.reader.events;
    return sum;
  }

  void open(Connection& c) {
    c.fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port_));
    inet_pton(AF_INET, host_.c_str(), &address.sin_addr);
    if (connect(c.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) die("connect");
    int one = 1;
    setsockopt(c.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    int room = 1 << 20;
    setsockopt(c.fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    fcntl(c.fd, F_SETFL, O_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = uint32_t(&c - connections_.data());
    epoll_ctl(poll_, EPOLL_CTL_ADD, c.fd, &event);
    c.reader.reset();
    c.busy = false;
  }

  // Open loop: a request that finds no idle connection counts as missed, it is not delayed.
  void start_idle(double due) {
    for (auto& c : connections_)
      if (!c.busy) { start(c); c.started = due; return; }
    ++missed_;
  }

  void start(Connection& c) {
    if (most_ && begun_ >= most_) return;
    ++begun_;
    if (texts_.empty()) {
      c.request = &whole_[next_body_++ % whole_.size()];
    } else {
      text_.clear();
      texts_.fill(form_, text_);
      c.own = head(path_, text_.size());
      c.own += text_;
      c.request = &c.own;
    }
    c.busy = true;
    c.seen_first = false;
    c.started = now();
    c.sent = 0;
    send_rest(c);
  }

  // A request that does not fit the socket's buffer is waited for: bodies here are smaller.
  void send_rest(Connection& c) {
    const std::string& request = *c.request;
    while (c.sent < request.size()) {
      ssize_t n = send(c.fd, request.data() + c.sent, request.size() - c.sent, MSG_NOSIGNAL);
      if (n > 0) { c.sent += size_t(n); continue; }
      if (errno != EAGAIN) { fail(c); return; }
      usleep(50);
    }
  }

  void fail(Connection& c) {
    ++errors_;
    close(c.fd);
    open(c);
    if (rate_ == 0) start(c);
  }

  void on_ready(Connection& c) {
    for (;;) {
      ssize_t n = recv(c.fd, buffer_, sizeof buffer_, 0);
      if (n < 0 && errno == EAGAIN) return;
      if (n <= 0) { fail(c); return; }
      if (quickack_) {
        int one = 1;
        setsockopt(c.fd, IPPROTO_TCP, TCP_QUICKACK, &one, sizeof one);
      }
      bytes_ += n;
      consume(c, buffer_, size_t(n));
      if (size_t(n) < sizeof buffer_) return;
    }
  }

  void consume(Connection& c, const char* data, size_t size) {
    while (size > 0) {
      size_t used = c.reader.feed(data, size);
      data += used;
      size -= used;
      bool first = tokens_ < 0 ? c.reader.started_body : c.reader.saw_text || c.reader.done();
      if (first && !c.seen_first) {
        c.seen_first = true;
        c.first = float(now() - c.started);
      }
      if (!c.reader.done()) continue;
      ++finished_;
      if (c.reader.status != 200) ++errors_;
      else if (!is_right(c.reader)) ++wrong_;
      else succeed(c);
      c.reader.reset();
      c.busy = false;
      if (rate_ == 0) start(c);
    }
  }

  void succeed(const Connection& c) {
    ++requests_;
    answer_events_ += c.reader.events_of_answer();
    first_.push_back(c.first);
    latency_.push_back(float(now() - c.started));
  }

  bool is_right(const ResponseReader& reader) {
    if (tokens_ < 0) return true;
    prompt_tokens_ += std::max(0l, reader.number_of("\"prompt_tokens\""));
    return reader.number_of("\"completion_tokens\"") == tokens_ && reader.is_whole();
  }

  void report(double elapsed, double cpu) {
    long events = total_events() - events_before_;
    printf("{\"seconds\": %.4f, \"requests\": %ld, \"errors\": %ld, \"missed\": %ld, "
           "\"events\": %ld, \"bytes\": %lld, \"requests_per_second\": %.1f, "
           "\"events_per_second\": %.1f, \"cpu_share\": %.3f, \"wrong\": %ld, \"finished\": %ld, "
           "\"prompt_tokens\": %lld, \"answer_events\": %ld, \"latency\": %s, \"first\": %s}\n",
           elapsed, requests_, errors_, missed_, events, bytes_, requests_ / elapsed,
           events / elapsed, cpu / elapsed, wrong_, finished_, prompt_tokens_,
           answer_events_, quantiles(latency_).c_str(),
           quantiles(first_).c_str());
  }
};

// ---------------------------------------------------------------- serve

// Counts whole requests in a stream of bytes: all it understands is Content-Length.
struct Client {
  int fd = -1;
  std::string in;
  std::string out;
  size_t sent = 0;
};

class Serve {
 public:
  explicit Serve(const Options& options)
      : port_(int(options.number("port", 0))), openai_(options.number("openai", 0) != 0) {
    int chunks = int(options.number("chunks", 0));
    std::string data = "data: " + std::string(size_t(options.number("bytes", 200)), 'x') + "\n\n";
    char line[32];
    if (chunks == 0) {
      answer_ = "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(data.size()) + "\r\n\r\n" +
                data;
      return;
    }
    answer_ = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    snprintf(line, sizeof line, "%zx\r\n", data.size());
    for (int i = 0; i < chunks; ++i) answer_ += line + data + "\r\n";
    answer_ += "0\r\n\r\n";
  }

  int run() {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) die("bind");
    listen(listener_, 1024);
    socklen_t length = sizeof address;
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    poll_ = epoll_create1(0);
    watch(listener_, EPOLLIN, nullptr);
    std::vector<epoll_event> ready(256);
    for (;;) {
      int n = epoll_wait(poll_, ready.data(), int(ready.size()), -1);
      for (int i = 0; i < n; ++i) {
        if (ready[i].data.ptr == nullptr) accept_one();
        else on_ready(static_cast<Client*>(ready[i].data.ptr));
      }
    }
  }

 private:
  int port_;
  bool openai_;
  int listener_ = -1, poll_ = -1;
  std::string answer_;
  std::map<std::string, std::string> answers_;
  char buffer_[1 << 16];

  void watch(int fd, uint32_t events, Client* client) {
    epoll_event event{};
    event.events = events;
    event.data.ptr = client;
    epoll_ctl(poll_, EPOLL_CTL_ADD, fd, &event);
  }

  void accept_one() {
    int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK);
    if (fd < 0) return;
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    auto* client = new Client;
    client->fd = fd;
    watch(fd, EPOLLIN | EPOLLOUT | EPOLLET, client);
  }

  void on_ready(Client* c) {
    for (;;) {
      ssize_t n = recv(c->fd, buffer_, sizeof buffer_, 0);
      if (n > 0) { c->in.append(buffer_, size_t(n)); continue; }
      if (n == 0 || errno != EAGAIN) { close(c->fd); delete c; return; }
      break;
    }
    while (const std::string* answer = take_request(c->in)) c->out += *answer;
    while (c->sent < c->out.size()) {
      ssize_t n = send(c->fd, c->out.data() + c->sent, c->out.size() - c->sent, MSG_NOSIGNAL);
      if (n < 0) return;  // EAGAIN: the edge comes back
      c->sent += size_t(n);
    }
    c->out.clear();
    c->sent = 0;
  }

  // Takes a whole request from `in` and returns its answer; null: it is not whole yet.
  const std::string* take_request(std::string& in) {
    size_t end = in.find("\r\n\r\n");
    if (end == std::string::npos) return nullptr;
    std::string head = in.substr(0, end + 2);
    std::transform(head.begin(), head.end(), head.begin(), ::tolower);
    size_t at = head.find("content-length: ");
    size_t body = at == std::string::npos ? 0 : strtoul(head.c_str() + at + 16, nullptr, 10);
    if (in.size() < end + 4 + body) return nullptr;
    const std::string* answer = openai_ ? &openai_answer(in, end + 4, body) : &answer_;
    in.erase(0, end + 4 + body);
    return answer;
  }

  // The number or word after a field of the body; a router may have written it anew.
  static std::string value(const std::string& in, size_t from, size_t size, const char* name) {
    size_t at = in.find(name, from);
    if (at == std::string::npos || at >= from + size) return "";
    at += strlen(name);
    while (at < in.size() && (in[at] == ' ' || in[at] == ':')) ++at;
    size_t end = at;
    while (end < in.size() && isalnum(in[end])) ++end;
    return in.substr(at, end - at);
  }

  const std::string& openai_answer(const std::string& in, size_t from, size_t size) {
    std::string tokens = value(in, from, size, "\"max_tokens\"");
    if (tokens.empty()) tokens = value(in, from, size, "\"max_completion_tokens\"");
    std::string stream = value(in, from, size, "\"stream\"");
    std::string choices = value(in, from, size, "\"n\"");
    std::string& answer = answers_[tokens + " " + stream + " " + choices];
    if (!answer.empty()) return answer;
    int count = atoi(tokens.c_str()), n = std::max(1, atoi(choices.c_str()));
    if (size == 0) answer = whole("{\"object\":\"list\",\"data\":[{\"id\":\"bench\"}]}");
    else if (stream == "true") answer = streamed(count, n);
    else answer = whole(completion(count, n));
    return answer;
  }

  static std::string whole(const std::string& body) {
    return "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\n\r\n" + body;
  }
  static std::string usage(int tokens) {
    return "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":" + std::to_string(tokens) +
           ",\"total_tokens\":" + std::to_string(tokens + 1) + "}}";
  }
  static std::string object(const std::string& kind) {
    return "{\"id\":\"chatcmpl-0123456789\",\"object\":\"" + kind +
           "\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[";
  }
  static std::string completion(int tokens, int n) {
    std::string text, made = object("chat.completion");
    for (int i = 0; i < tokens; ++i) text += "word ";
    for (int i = 0; i < n; ++i)
      made += std::string(i ? "," : "") + "{\"index\":" + std::to_string(i) +
              ",\"message\":{\"role\":\"assistant\",\"content\":\"" + text +
              "\"},\"finish_reason\":\"length\"}";
    return made + "]," + usage(tokens * n);
  }
  static std::string streamed(int tokens, int n) {
    std::string made =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (int i = 0; i < tokens; ++i)
      for (int k = 0; k < n; ++k)
        made += event(object("chat.completion.chunk") + "{\"index\":" + std::to_string(k) +
                      ",\"delta\":{\"content\":\" word\"},\"finish_reason\":" +
                      (i + 1 == tokens ? "\"length\"" : "null") + "}]}");
    made += event(object("chat.completion.chunk") + "]," + usage(tokens * n));
    return made + event("[DONE]") + "0\r\n\r\n";
  }
  static std::string event(const std::string& data) {
    char line[32];
    snprintf(line, sizeof line, "%zx\r\n", data.size() + 8);
    return line + ("data: " + data + "\n\n\r\n");
  }
};

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  std::string command = argc > 1 ? argv[1] : "";
  if (command == "load") return Load(Options(argc, argv)).run();
  if (command == "serve") return Serve(Options(argc, argv)).run();
  fprintf(stderr, "usage: loadgen load|serve --port P ...\n");
  return 2;
}
