package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
)

// The socket hooks recognize a pod without hooks by its cgroup (pod_unhooked in
// bpf/lib/sock/translate.h). The kubelet makes the cgroup before the pod's network and its first
// container, and after the API server has announced the Pod. So the agent looks for a new
// pod's cgroup soon and often, and later checks that it is still the same.
const (
	unhookFirst = 50 * time.Millisecond
	unhookLater = 10 * time.Second
)

// askUnhook wakes unhookLoop.
func (w *Writer) askUnhook() {
	select {
	case w.unhook <- struct{}{}:
	default: // it is about to look
	}
}

// unhookLoop looks for the cgroups of pods without socket hooks until ctx is done. It
// reports a pod without a cgroup once, when it has looked for some seconds.
func (w *Writer) unhookLoop(ctx context.Context) {
	wait, reported := unhookLater, false
	timer := time.NewTimer(unhookFirst)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.unhook:
			wait, reported = unhookFirst, false
		case <-timer.C:
			wait = min(2*wait, unhookLater)
		}
		w.mu.Lock()
		missing, err := w.writeUnhooked()
		w.mu.Unlock()
		if err != nil {
			w.cfg.Log.Error("Exclude pods from socket hooks", "err", err)
		} else if len(missing) > 0 && wait == unhookLater && !reported {
			reported = true
			w.cfg.Log.Warn("Pods have socket hooks in spite of their annotation: their cgroups are not found",
				"cgroup", w.cfg.CgroupRoot, "uids", missing)
		}
		if len(missing) == 0 {
			wait = unhookLater
		}
		timer.Reset(wait)
	}
}

// writeUnhooked writes the cgroups of the pods without socket hooks, and returns the UIDs
// of those that have none. The caller holds mu.
func (w *Writer) writeUnhooked() (missing []string, err error) {
	if w.node == nil || w.cfg.SocketHooks != objects.HooksAll {
		return nil, nil
	}
	found, err := podCgroups(w.cfg.CgroupRoot, w.node.UnhookedPods)
	if err != nil {
		return nil, fmt.Errorf("find cgroups of pods: %w", err)
	}
	want := map[uint64]uint8{}
	for _, uid := range w.node.UnhookedPods {
		if id, ok := found[uid]; ok {
			want[id] = 1
		} else {
			missing = append(missing, uid)
		}
	}
	if err := objects.ReplaceMap(w.m(objects.TCMapUnhookedCgroups), want); err != nil {
		return missing, fmt.Errorf("write cgroups without socket hooks: %w", err)
	}
	return missing, nil
}

// podCgroups returns the ids of the cgroups of pods, by UID. An id is the inode of the directory.
func podCgroups(root string, uids []string) (map[string]uint64, error) {
	found := map[string]uint64{}
	if len(uids) == 0 {
		return found, nil
	}
	wanted := make(map[string]bool, len(uids))
	for _, uid := range uids {
		wanted[uid] = true
	}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV):
			return nil // removed meanwhile
		case err != nil || !d.IsDir():
			return err
		}
		uid, ok := kernel.PodUID(d.Name())
		if !ok {
			return nil
		}
		// A pod has no pods: what a container names its own cgroups does not count.
		if wanted[uid] {
			if info, err := d.Info(); err == nil {
				if st, ok := info.Sys().(*syscall.Stat_t); ok {
					found[uid] = st.Ino
				}
			}
		}
		return fs.SkipDir
	})
	return found, err
}
