// Package buckets compares two layouts of the flow table: two entries a flow in an LRU hash, as the
// product has it, and one entry a flow in buckets. It is a prototype, and no part of the product.
// docs/adr/0061-one-entry-a-flow.md has the question and the answer.
package buckets
