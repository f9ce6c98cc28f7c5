// A table that is sorted by its headings, also by keys, and is a list of cards on a phone. Its template is compiled
// once: cells of NiceGUI's own tables are made anew with every update, and lose the focus.
const seconds = (v) =>
  v < 90 ? `${v.toFixed(v < 10 ? 1 : 0)} s`
  : v < 5400 ? `${(v / 60).toFixed(0)} min`
  : v < 129600 ? `${(v / 3600).toFixed(1)} h`
  : `${(v / 86400).toFixed(1)} d`;
const FORMATS = {
  bytes: (v) => (v < 1e9 ? `${(v / 1e6).toFixed(0)} MB` : `${(v / 1e9).toFixed(2)} GB`),
  ms: (v) => `${v.toFixed(v < 10 ? 2 : 0)} ms`,
  number: (v) => Number(v).toLocaleString("en", { maximumFractionDigits: v < 9 ? 2 : 0 }),
  seconds,
};
const CHIP = `<q-badge v-if="props.row.trouble" color="negative" :title="props.row.why_trouble">
  {{ props.row.trouble }}</q-badge>`;
const LINK = "<a :href='`/session/${props.row.session}`' class='plain'>{{ props.row.session }}</a>";

export default {
  props: { columns: Array, rows: Array, rowKey: String, empty: String, filter: String },
  emits: ["choose"],
  computed: {
    formatted() {
      return this.columns.map((column) => {
        const format = FORMATS[column.unit];
        const common = { ...column, field: column.name, sortable: true, align: format ? "right" : "left" };
        return format ? { ...common, format: (v) => (v == null ? "-" : format(v)) } : common;
      });
    },
  },
  template: `
    <q-table dense flat bordered class="full-width" :columns="formatted" :rows="rows" :row-key="rowKey"
      :filter="filter" :grid="$q.screen.lt.sm" :no-data-label="empty" :pagination="{rowsPerPage: 25}"
      :rows-per-page-options="[25, 100, 0]" @row-click="(event, row) => $emit('choose', row)">
      <template #header-cell="props">
        <q-th :props="props" tabindex="0" @keydown.enter="props.sort(props.col.name)">{{ props.col.label }}</q-th>
      </template>
      <template #body-cell-session="props"><q-td :props="props">${LINK}</q-td></template>
      <template #body-cell-trouble="props"><q-td :props="props">${CHIP}</q-td></template>
      <template #item="props">
        <div class="col-12 q-pa-xs"><q-card flat bordered class="q-pa-sm">
          <div class="row items-center q-gutter-x-sm">
            <span v-if="props.row.session">${LINK}</span>
            <b v-if="props.cols[0].name !== 'session'">{{ props.cols[0].label }} {{ props.cols[0].value }}</b>${CHIP}
          </div>
          <div class="row q-gutter-x-md text-caption">
            <template v-for="col in props.cols.slice(1)" :key="col.name">
              <span v-if="!['session', 'trouble'].includes(col.name) && !['', '-', null].includes(col.value)">
                <span style="opacity: .7">{{ col.label }}</span> {{ col.value }}</span>
            </template>
          </div>
        </q-card></div>
      </template>
    </q-table>`,
};
