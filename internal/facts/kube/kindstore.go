package kube

import (
	"cmp"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/internal/facts/model"
)

// kindStore holds the models, of type M, of the objects of one Kubernetes kind, of API type A. It
// is the cache.ReflectorStore that a Reflector of the kind writes to. Callers of all other methods
// hold source.mu.
type kindStore[A apiObject, M any] struct {
	source   *Source
	name     string // "Service"
	optional bool   // the source works without it
	// ours marks kinds that only do-not-track policies need.
	ours     bool
	resource string // as RBAC has it; "": by the name
	sample   A      // nil: the type is enough
	lw       cache.ListerWatcher
	trim     func(A) // removes unused fields; may be nil
	convert  func(A) (*M, []model.Problem)
	put      func(*model.Delta, model.Name, *M)
	// foreign marks objects of other programs, which are only counted; may be nil.
	foreign func(A) bool

	known     map[model.Name]*M
	others    map[model.Name]struct{} // the foreign objects
	listed    bool
	forbidden bool // the last list may be out of date, without notice
	streaming bool // the open watch begins with all objects
}

type apiObject interface {
	v1.Object
	runtime.Object
}

func (k *kindStore[A, M]) title() string                  { return k.name }
func (k *kindStore[A, M]) isOurs() bool                   { return k.ours }
func (k *kindStore[A, M]) listWatch() cache.ListerWatcher { return k.lw }

func (k *kindStore[A, M]) example() any {
	return k.sample
}

func (k *kindStore[A, M]) state() (listed, forbidden, optional bool) {
	return k.listed, k.forbidden, k.optional
}

// watching records that a watch was opened. A watch that continues from the known state
// confirms it at once. A watch that begins with all objects confirms it when they have
// arrived.
func (k *kindStore[A, M]) watching(fromStart bool) {
	k.streaming = fromStart
	if !fromStart {
		k.forbidden = false
	}
}

func (k *kindStore[A, M]) refused(forbidden bool) { k.forbidden, k.streaming = forbidden, false }

// rbac returns the right that a ClusterRole must grant.
func (k *kindStore[A, M]) rbac() string { return cmp.Or(k.resource, resources[k.name]) }

// dropAll deletes all known objects.
func (k *kindStore[A, M]) dropAll(d *model.Delta) {
	for name := range k.known {
		k.drop(d, name)
	}
	for o := range k.source.faults {
		if o.kind == k.name {
			k.source.setFaults(o, "", nil)
		}
	}
}

func (k *kindStore[A, M]) fill(d *model.Delta) {
	for name, m := range k.known {
		k.put(d, name, m)
	}
}

// Add adds a new object.
func (k *kindStore[A, M]) Add(obj any) error { return k.Update(obj) }

// Update updates an object.
func (k *kindStore[A, M]) Update(obj any) error {
	a, ok := obj.(A)
	if !ok {
		return fmt.Errorf("watch %s: the API server sent a %T", k.name, obj)
	}
	k.source.mu.Lock()
	defer k.source.mu.Unlock()
	var d model.Delta
	k.onUpdate(&d, a)
	k.source.emit(d)
	return nil
}

// Delete deletes an object.
func (k *kindStore[A, M]) Delete(obj any) error {
	a, ok := obj.(A)
	if !ok {
		return fmt.Errorf("watch %s: the API server sent a %T", k.name, obj)
	}
	k.source.mu.Lock()
	defer k.source.mu.Unlock()
	var d model.Delta
	k.drop(&d, nameOf(a))
	k.source.emit(d)
	return nil
}

// Replace receives all objects: at the start, and when a watch cannot be resumed. It
// delivers only the difference.
func (k *kindStore[A, M]) Replace(list []any, _ string) error {
	k.source.mu.Lock()
	defer k.source.mu.Unlock()
	var d model.Delta
	there := make(map[model.Name]bool, len(list))
	for i, obj := range list {
		a, ok := obj.(A)
		if !ok {
			return fmt.Errorf("list %s: the API server sent a %T", k.name, obj)
		}
		there[nameOf(a)] = true
		k.onUpdate(&d, a)
		list[i] = nil // frees the objects of a large list early
	}
	for name := range k.known {
		if !there[name] {
			k.drop(&d, name)
		}
	}
	for name := range k.others {
		if !there[name] {
			delete(k.others, name)
		}
	}
	for o := range k.source.faults {
		if o.kind == k.name && !there[o.name] {
			k.source.setFaults(o, "", nil)
		}
	}
	k.listed = true
	if k.streaming {
		k.forbidden = false
	}
	k.source.emit(d)
	return nil
}

// Resync does nothing: kindStore keeps all its objects.
func (k *kindStore[A, M]) Resync() error { return nil }

// Transformer slims objects while a Reflector collects a list of them.
func (k *kindStore[A, M]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if a, ok := obj.(A); ok {
			a.SetManagedFields(nil)
			a.SetFinalizers(nil)
			a.SetOwnerReferences(nil)
			if k.trim != nil {
				k.trim(a)
			}
		}
		return obj, nil
	}
}

// onUpdate converts an object and enters it into the Delta if it has changed. An invalid
// object keeps its last valid state, as an invalid file does.
func (k *kindStore[A, M]) onUpdate(d *model.Delta, a A) {
	name := nameOf(a)
	if k.foreign != nil && k.foreign(a) {
		k.drop(d, name)
		k.others[name] = struct{}{}
		return
	}
	delete(k.others, name)
	if k.trim != nil {
		k.trim(a)
	}
	m, problems := k.convert(a)
	k.source.setFaults(object{k.name, name}, string(a.GetUID()), problems)
	old := k.known[name]
	switch {
	case m == nil && old == nil:
	case m == nil && len(problems) > 0:
		// The object is unusable: its last good state keeps serving.
	case m == nil:
		k.drop(d, name)
	case !reflect.DeepEqual(m, old):
		k.known[name] = m
		k.put(d, name, m)
		k.source.faultsChanged = k.source.faultsChanged || old == nil && k.name == model.KindService // see objectProblems
	}
}

func (k *kindStore[A, M]) drop(d *model.Delta, name model.Name) {
	k.source.setFaults(object{k.name, name}, "", nil)
	delete(k.others, name)
	if _, ok := k.known[name]; ok {
		delete(k.known, name)
		k.put(d, name, nil)
		k.source.faultsChanged = k.source.faultsChanged || k.name == model.KindService
	}
}

func nameOf(a v1.Object) model.Name {
	return model.Name{Namespace: a.GetNamespace(), Name: a.GetName()}
}
