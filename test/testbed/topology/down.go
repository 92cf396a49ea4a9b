package topology

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// removeWithin is the time for the kernel to release cgroups whose processes were killed.
const removeWithin = 10 * time.Second

// Down ends the cluster's processes and removes all of it. A second call does nothing.
func (c *Cluster) Down() error { return Down(c.Spec.Name) }

// Down removes a cluster by its name: a complete one, a partial one, or one without its
// state file. A missing cluster is no error.
func Down(name string) error {
	if err := RequireRoot(); err != nil {
		return err
	}
	if err := validName(name); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	unlock, err := lock(ctx, name)
	if err != nil {
		return err
	}
	defer unlock()
	return down(ctx, name)
}

// DownAll removes every cluster that List names.
func DownAll() error {
	names, err := List()
	for _, name := range names {
		err = errors.Join(err, Down(name))
	}
	return err
}

// down does the work, with the cluster locked. It removes the state last, so that after
// an interruption another process finds the rest.
func down(ctx context.Context, name string) error {
	root, err := clusterCgroup(name)
	if c, loadErr := Load(name); loadErr == nil {
		root, err = c.cgroupRoot, c.writeState(StatusRemoving)
	}
	if err == nil {
		err = endProcesses(root)
	}
	if err != nil {
		return fmt.Errorf("remove lab cluster %q: %w", name, err)
	}
	names, err := Namespaces(name)
	for _, ns := range names {
		err = errors.Join(err, removeNamespace(ns))
	}
	err = errors.Join(err, removeCgroups(ctx, root))
	if err == nil {
		err = os.RemoveAll(stateDir(name))
	}
	if err != nil {
		return fmt.Errorf("remove lab cluster %q: %w", name, err)
	}
	_ = os.Remove(stateRoot) // if this was the last cluster
	return nil
}
