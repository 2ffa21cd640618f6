/* Counts the calls that change files below $CALLS_UNDER, and spoils the one of number $CALLS_AT. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int calls;

static int below(const char *path) {
    const char *under = getenv("CALLS_UNDER");
    return under && path && !strncmp(path, under, strlen(under));
}

static int at(int folder, const char *path) { /* whether a path relative to a folder is below */
    char link[64], place[PATH_MAX];
    if (path && path[0] == '/') return below(path);
    if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, place, sizeof place - 1);
    if (length < 0) return 0;
    place[length] = 0;
    return below(place);
}

static void end(void) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }

/* 0: make the call; 1: make it and end; 2: write a half and end; -1: fail with errno. */
static int spoil(const char *name, int is_open, int is_write) {
    const char *when = getenv("CALLS_AT"), *how = getenv("CALLS_HOW"), *log = getenv("CALLS_LOG");
    int number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (log) {
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0644);
        syscall(SYS_write, file, name, strlen(name));
        syscall(SYS_write, file, "\n", 1);
        syscall(SYS_close, file);
    }
    if (!when || !how || number != atoi(when)) return 0;
    if (!strcmp(how, "kill")) end();
    if (!strcmp(how, "torn")) return is_write ? 2 : 1;
    if (!strcmp(how, "EMFILE") && !is_open) return 0;
    errno = !strcmp(how, "ENOSPC") ? ENOSPC : !strcmp(how, "EIO") ? EIO
          : !strcmp(how, "EROFS") ? EROFS : EMFILE;
    return -1;
}

#define CALL(result, name, types, names, applies, is_open)                                        \
    result name types {                                                                           \
        static result (*own) types;                                                               \
        if (!own) own = dlsym(RTLD_NEXT, #name);                                                  \
        if (!(applies)) return own names;                                                         \
        int what = spoil(#name, is_open, 0);                                                      \
        if (what < 0) return -1;                                                                  \
        result value = own names;                                                                 \
        if (what) end();                                                                          \
        return value;                                                                             \
    }
#define OPEN(name, types, names, folder, path)                                                    \
    int name types {                                                                              \
        static int (*own)();                                                                      \
        if (!own) own = dlsym(RTLD_NEXT, #name);                                                  \
        va_list more;                                                                             \
        va_start(more, flags);                                                                    \
        mode_t mode = va_arg(more, mode_t);                                                       \
        va_end(more);                                                                             \
        int changes = (flags & (O_WRONLY | O_RDWR | O_CREAT)) && at(folder, path);                \
        int what = changes ? spoil(#name, 1, 0) : 0;                                              \
        if (what < 0) return -1;                                                                  \
        int value = own names;                                                                    \
        if (what) end();                                                                          \
        return value;                                                                             \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD, path)
OPEN(openat, (int f, const char *path, int flags, ...), (f, path, flags, mode), f, path)
OPEN(openat64, (int f, const char *path, int flags, ...), (f, path, flags, mode), f, path)
CALL(int, fsync, (int f), (f), at(f, NULL), 0)
CALL(int, ftruncate, (int f, off_t n), (f, n), at(f, NULL), 0)
CALL(int, ftruncate64, (int f, off64_t n), (f, n), at(f, NULL), 0)
CALL(int, rename, (const char *a, const char *b), (a, b), at(AT_FDCWD, b), 0)
CALL(int, renameat, (int f, const char *a, int g, const char *b), (f, a, g, b), at(g, b), 0)
CALL(int, unlink, (const char *a), (a), at(AT_FDCWD, a), 0)
CALL(int, unlinkat, (int f, const char *a, int flags), (f, a, flags), at(f, a), 0)
CALL(int, mkdir, (const char *a, mode_t m), (a, m), at(AT_FDCWD, a), 0)
CALL(int, mkdirat, (int f, const char *a, mode_t m), (f, a, m), at(f, a), 0)
CALL(int, rmdir, (const char *a), (a), at(AT_FDCWD, a), 0)
CALL(int, symlink, (const char *to, const char *a), (to, a), at(AT_FDCWD, a), 0)
CALL(int, symlinkat, (const char *to, int f, const char *a), (to, f, a), at(f, a), 0)

ssize_t write(int f, const void *data, size_t size) {
    static ssize_t (*own)(int, const void *, size_t);
    if (!own) own = dlsym(RTLD_NEXT, "write");
    int what = at(f, NULL) ? spoil("write", 0, 1) : 0;
    if (what < 0) return -1;
    ssize_t value = own(f, data, what == 2 ? size / 2 : size);
    if (what) end();
    return value;
}
