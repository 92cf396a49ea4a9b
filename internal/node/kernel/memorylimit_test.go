package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/test/must"
)

// Files and their contents: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
func TestMemoryLimit(t *testing.T) {
	const v1None = "9223372036854771712"
	for _, row := range []struct {
		name   string
		mounts string // mount point, root, type, options of each
		own    string
		files  map[string]string
		want   uint64
		in     string
	}{
		{"a container's own namespace", "sys / cgroup2 rw", "0::/\n", map[string]string{"sys/memory.max": "134217728\n"},
			128 << 20, "sys/memory.max"},
		{"no limit", "sys / cgroup2 rw", "0::/\n", map[string]string{"sys/memory.max": "max\n"}, 0, ""},
		{"a parent's is lower", "sys / cgroup2 rw", "0::/pods/a/b\n",
			map[string]string{"sys/pods/memory.max": "max", "sys/pods/a/memory.max": "1000", "sys/pods/a/b/memory.max": "2000"}, 1000,
			"sys/pods/a/memory.max"},
		{"its own is lower", "sys / cgroup2 rw", "0::/pods/a\n",
			map[string]string{"sys/pods/memory.max": "3000", "sys/pods/a/memory.max": "2000"}, 2000, "sys/pods/a/memory.max"},
		{"another cgroup's", "sys / cgroup2 rw", "0::/a\n", map[string]string{"sys/b/memory.max": "3000"}, 0, ""},
		{"a mount of a part", "sys /pods/a cgroup2 rw", "0::/pods/a/b\n", map[string]string{"sys/b/memory.max": "7000"},
			7000, "sys/b/memory.max"},
		{"the node's tree beside it", "host /../.. cgroup2 rw\nsys / cgroup2 rw", "0::/\n",
			map[string]string{"host/memory.max": "1", "sys/memory.max": "5000"}, 5000, "sys/memory.max"},
		{"version 1", "v1/cpu / cgroup rw,cpu\nv1/memory / cgroup rw,memory\nv1/unified / cgroup2 rw", "4:memory:/a/b\n3:cpu:/\n0::/\n",
			map[string]string{"v1/memory/memory.limit_in_bytes": v1None, "v1/memory/a/memory.limit_in_bytes": "4096000\n",
				"v1/memory/a/b/memory.limit_in_bytes": v1None, "v1/cpu/memory.limit_in_bytes": "1"},
			4096000, "v1/memory/a/memory.limit_in_bytes"},
		{"version 1 without a limit", "v1/memory / cgroup rw,memory", "4:cpu,memory:/\n",
			map[string]string{"v1/memory/memory.limit_in_bytes": v1None}, 0, ""},
		{"nothing mounted", "sys / tmpfs rw", "0::/\n", map[string]string{"sys/memory.max": "5"}, 0, ""},
	} {
		top := t.TempDir()
		for name, text := range row.files {
			file := filepath.Join(top, name)
			must.Do(t, os.MkdirAll(filepath.Dir(file), 0o755))
			must.Do(t, os.WriteFile(file, []byte(text), 0o644))
		}
		mounts := ""
		for i, line := range strings.Split(row.mounts, "\n") {
			f := strings.Fields(line)
			mounts += fmt.Sprintf("%d 23 0:%d %s %s rw,relatime - %s none %s\n", 30+i, 28+i, f[1], filepath.Join(top, f[0]), f[2], f[3])
		}
		limit, file := memoryLimit([]byte(mounts), row.own)
		if row.in != "" {
			row.in = filepath.Join(top, row.in)
		}
		if limit != row.want || file != row.in {
			t.Errorf("%s: limit %d in %q, want %d in %q", row.name, limit, file, row.want, row.in)
		}
	}
}
