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

// kind watches the objects of one Kubernetes kind, of API type A, and knows
// their models, of type M. It is what a Reflector writes to. All methods but
// those of the Reflector's are called with source.mu held.
type kind[A apiObject, M any] struct {
	source   *Source
	name     string // "Service"
	optional bool   // the source can do without
	// ours: without it there is no do-not-track policy, and nothing else is missing.
	ours     bool
	resource string // as RBAC has it; "": by the name
	sample   A      // nil: what the type says is enough
	lw       cache.ListerWatcher
	trim     func(A) // drops what is not used; may be nil
	convert  func(A) (*M, []model.Problem)
	put      func(*model.Delta, model.Name, *M)
	uidOf    func(*M) string // may be nil

	known     map[model.Name]*M
	listed    bool
	forbidden bool // the last list may be out of date, without notice
	streaming bool // a watch is open that begins with all there is
}

type apiObject interface {
	v1.Object
	runtime.Object
}

func (k *kind[A, M]) title() string                  { return k.name }
func (k *kind[A, M]) isOurs() bool                   { return k.ours }
func (k *kind[A, M]) listWatch() cache.ListerWatcher { return k.lw }

func (k *kind[A, M]) example() any {
	return k.sample
}

func (k *kind[A, M]) state() (listed, forbidden, optional bool) {
	return k.listed, k.forbidden, k.optional
}

// watching notes that a watch was opened. One that goes on from what is known
// makes it known again; one that begins with all there is does when that is in.
func (k *kind[A, M]) watching(fromStart bool) {
	k.streaming = fromStart
	if !fromStart {
		k.forbidden = false
	}
}

func (k *kind[A, M]) refused(forbidden bool) { k.forbidden, k.streaming = forbidden, false }

func (k *kind[A, M]) uid(name model.Name) string {
	if m := k.known[name]; m != nil && k.uidOf != nil {
		return k.uidOf(m)
	}
	return ""
}

// rbac is what is asked for in a ClusterRole.
func (k *kind[A, M]) rbac() string { return cmp.Or(k.resource, resources[k.name]) }

// dropAll takes out all that is known.
func (k *kind[A, M]) dropAll(d *model.Delta) {
	for name := range k.known {
		k.drop(d, name)
	}
	for o := range k.source.faults {
		if o.kind == k.name {
			k.source.setFaults(o, "", nil)
		}
	}
}

func (k *kind[A, M]) fill(d *model.Delta) {
	for name, m := range k.known {
		k.put(d, name, m)
	}
}

// Add takes in a new object.
func (k *kind[A, M]) Add(obj any) error { return k.Update(obj) }

// Update takes in an object.
func (k *kind[A, M]) Update(obj any) error {
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

// Delete takes in that an object has gone.
func (k *kind[A, M]) Delete(obj any) error {
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

// Replace takes in all objects there are: at the start, and when a watch cannot
// be taken up again. Only the difference is delivered.
func (k *kind[A, M]) Replace(list []any, _ string) error {
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
		list[i] = nil // a large list is half garbage before its end
	}
	for name := range k.known {
		if !there[name] {
			k.drop(&d, name)
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

// Resync has nothing to do: nothing here forgets.
func (k *kind[A, M]) Resync() error { return nil }

// Transformer slims objects while a list of them is being collected.
func (k *kind[A, M]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if a, ok := obj.(A); ok {
			a.SetManagedFields(nil)
			if k.trim != nil {
				k.trim(a)
			}
		}
		return obj, nil
	}
}

// onUpdate converts an object and enters it into the Delta if it has changed. An invalid
// object keeps its last valid state, as an invalid file does.
func (k *kind[A, M]) onUpdate(d *model.Delta, a A) {
	name := nameOf(a)
	if k.trim != nil {
		k.trim(a)
	}
	m, problems := k.convert(a)
	k.source.setFaults(object{k.name, name}, string(a.GetUID()), problems)
	old := k.known[name]
	switch {
	case m == nil && old == nil:
	case m == nil && len(problems) > 0:
		// Unusable: what was served keeps serving.
	case m == nil:
		k.drop(d, name)
	case !reflect.DeepEqual(m, old):
		k.known[name] = m
		k.put(d, name, m)
	}
}

func (k *kind[A, M]) drop(d *model.Delta, name model.Name) {
	k.source.setFaults(object{k.name, name}, "", nil)
	if _, ok := k.known[name]; ok {
		delete(k.known, name)
		k.put(d, name, nil)
	}
}

func nameOf(a v1.Object) model.Name {
	return model.Name{Namespace: a.GetNamespace(), Name: a.GetName()}
}
