// Reports of a launch: each distinct one once, with how often it came.

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "worker.h"

namespace sim {

constexpr uint64_t MAX_EVENTS = 200000;   // a kernel this wrong need not run to its end

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Launch *launch;
static uint64_t events;
static uint16_t table[512];               // open addressing over reports: index + 1

void begin_reports(Launch *begun) {
  launch = begun;
  launch->report_count = 0;
  events = 0;
  memset(table, 0, sizeof table);
}

static uint64_t mix(uint64_t value) { return value * 0x9E3779B97F4A7C15ull ^ value >> 29; }

static uint64_t key_of(const Report &r) {
  uint64_t key = mix(r.kind + 1) ^ mix(r.address) ^ mix(r.other_address * 3);
  if (!r.address)
    for (const char *c = r.location[0] ? r.location : r.message; *c; c++) key = mix(key + (unsigned char)*c);
  return key;
}

static bool same(const Report &one, const Report &two) {
  if (one.kind != two.kind || one.address != two.address || one.other_address != two.other_address) return false;
  return one.address || (!strcmp(one.location, two.location) && !strcmp(one.message, two.message));
}

// False when no more are taken.
static bool keep(const Report &found) {
  pthread_mutex_lock(&lock);
  bool room = ++events < MAX_EVENTS;
  for (uint64_t i = key_of(found);; i++) {
    uint16_t &entry = table[i % 512];
    if (entry && !same(launch->reports[entry - 1], found)) continue;
    if (entry) {
      launch->reports[entry - 1].times++;
    } else if (launch->report_count == MAX_REPORTS) {
      room = false;
    } else {
      launch->reports[launch->report_count] = found;
      entry = (uint16_t)++launch->report_count;
    }
    break;
  }
  pthread_mutex_unlock(&lock);
  return room;
}

static void file(Report &found, const Fiber *fiber, const char *format, va_list values) {
  Worker *w = worker;
  found.times = 1;
  found.thread = fiber ? fiber->thread.thread_index_in_threadgroup : NOBODY;
  found.threadgroup = fiber ? w->threadgroup_index : NOBODY;
  vsnprintf(found.message, sizeof found.message, format, values);
  if (w) w->reporting = true;
  const bool room = keep(found);
  if (w) w->reporting = false;
  if (!room && fiber && !w->abandoned) abandon_launch(*w);
}

static const Fiber *running() { return worker ? worker->current : nullptr; }

static Report of_kind(ReportKind kind, const void *code) {
  Report found = {};
  found.kind = kind;
  found.address = (uint64_t)code;
  found.other_thread = found.other_threadgroup = NOBODY;
  return found;
}

void report(ReportKind kind, const void *code, const char *format, ...) {
  Report found = of_kind(kind, code);
  va_list values;
  va_start(values, format);
  file(found, running(), format, values);
  va_end(values);
}

void report_both(ReportKind kind, const void *code, Other other, const char *format, ...) {
  Report found = of_kind(kind, code);
  found.other_address = (uint64_t)other.code;
  found.other_thread = other.thread;
  found.other_threadgroup = other.threadgroup;
  va_list values;
  va_start(values, format);
  file(found, running(), format, values);
  va_end(values);
}

void report_wait(ReportKind kind, const Fiber &fiber, const char *format, ...) {
  Report found = of_kind(kind, fiber.site);
  va_list values;
  va_start(values, format);
  file(found, &fiber, format, values);
  va_end(values);
}

void report_at(ReportKind kind, const char *path, unsigned line, const char *format, ...) {
  Report found = of_kind(kind, nullptr);
  snprintf(found.location, sizeof found.location, "%s:%u", path, line);
  va_list values;
  va_start(values, format);
  file(found, running(), format, values);
  va_end(values);
}

}  // namespace sim
