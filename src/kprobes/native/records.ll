; Generated from records.c by `make runtime`.
; 7289b7d65ea582ad1a94a5313f0f6307f50afdebe8d87cfe0d892b3e00d70658
%struct.group = type { ptr, ptr, i64 }
define dso_local i64 @records_find(ptr %chunk, ptr %offsets, ptr %ids) #0 {
entry:
  %is_damaged = getelementptr inbounds nuw i8, ptr %chunk, i64 72
  store i64 0, ptr %is_damaged, align 8
  br label %while.cond
while.cond:
  %offset.0 = phi i64 [ 0, %entry ], [ %add21, %if.end19 ]
  %count.0 = phi i64 [ 0, %entry ], [ %inc, %if.end19 ]
  %limit = getelementptr inbounds nuw i8, ptr %chunk, i64 32
  %0 = load i64, ptr %limit, align 8
  %cmp = icmp ult i64 %offset.0, %0
  br i1 %cmp, label %land.rhs, label %while.end
land.rhs:
  %commits_size = getelementptr inbounds nuw i8, ptr %chunk, i64 24
  %1 = load i64, ptr %commits_size, align 8
  %sub = sub i64 %1, %offset.0
  %cmp1 = icmp ugt i64 %sub, 7
  br i1 %cmp1, label %while.body, label %while.end
while.body:
  %position2 = getelementptr inbounds nuw i8, ptr %chunk, i64 40
  %2 = load i64, ptr %position2, align 8
  %add = add i64 %2, %offset.0
  %shl = shl i64 %add, 16
  %commits = getelementptr inbounds nuw i8, ptr %chunk, i64 16
  %3 = load ptr, ptr %commits, align 8
  %add.ptr = getelementptr inbounds i8, ptr %3, i64 %offset.0
  %4 = load i64, ptr %add.ptr, align 1
  %cmp4 = icmp eq i64 %4, %shl
  %sub3 = sub i64 %4, %shl
  %cmp5 = icmp ugt i64 %sub3, 65535
  %or.cond = or i1 %cmp4, %cmp5
  br i1 %or.cond, label %while.end, label %if.end
if.end:
  %size6 = getelementptr inbounds nuw i8, ptr %chunk, i64 8
  %5 = load i64, ptr %size6, align 8
  %sub7 = sub i64 %5, %offset.0
  %cmp8 = icmp ult i64 %sub7, 40
  br i1 %cmp8, label %cond.end, label %cond.false
cond.false:
  %6 = load ptr, ptr %chunk, align 8
  %add.ptr9 = getelementptr inbounds i8, ptr %6, i64 %offset.0
  %7 = load i64, ptr %add.ptr9, align 1
  %sub11 = sub i64 %7, %shl
  br label %cond.end
cond.end:
  %cond = phi i64 [ %sub11, %cond.false ], [ 0, %if.end ]
  %cmp12 = icmp ult i64 %cond, 65536
  br i1 %cmp12, label %cond.true13, label %cond.end15
cond.true13:
  %size.i = getelementptr inbounds nuw i8, ptr %chunk, i64 8
  %8 = load i64, ptr %size.i, align 8
  %sub.i = sub i64 %8, %offset.0
  %sizes.i = getelementptr inbounds nuw i8, ptr %chunk, i64 48
  %9 = load ptr, ptr %sizes.i, align 8
  %arrayidx.i = getelementptr inbounds nuw i64, ptr %9, i64 %cond
  %10 = load i64, ptr %arrayidx.i, align 8
  %size_offsets.i = getelementptr inbounds nuw i8, ptr %chunk, i64 56
  %11 = load ptr, ptr %size_offsets.i, align 8
  %arrayidx2.i = getelementptr inbounds nuw i64, ptr %11, i64 %cond
  %12 = load i64, ptr %arrayidx2.i, align 8
  %tobool.i.not = icmp eq i64 %10, 0
  %cmp.i = icmp ugt i64 %10, %sub.i
  %or.cond41 = select i1 %tobool.i.not, i1 true, i1 %cmp.i
  br i1 %or.cond41, label %cond.end15, label %if.end.i
if.end.i:
  %tobool3.i.not = icmp eq i64 %12, 0
  br i1 %tobool3.i.not, label %cond.end15, label %if.end5.i
if.end5.i:
  %13 = load ptr, ptr %chunk, align 8
  %add.ptr.i = getelementptr inbounds i8, ptr %13, i64 %offset.0
  %add.ptr6.i = getelementptr inbounds i8, ptr %add.ptr.i, i64 %12
  %14 = load i32, ptr %add.ptr6.i, align 1
  %conv.i = zext i32 %14 to i64
  %cmp7.i.not = icmp ule i64 %10, %conv.i
  %rem.i = and i64 %conv.i, 7
  %cmp9.i = icmp eq i64 %rem.i, 0
  %or.cond42 = and i1 %cmp7.i.not, %cmp9.i
  %or.cond42.not = xor i1 %or.cond42, true
  %cmp12.i.not = icmp ult i64 %sub.i, %conv.i
  %or.cond43 = select i1 %or.cond42.not, i1 true, i1 %cmp12.i.not
  %cond.i = select i1 %or.cond43, i64 0, i64 %conv.i
  br label %cond.end15
cond.end15:
  %cond16 = phi i64 [ %10, %if.end.i ], [ 0, %cond.true13 ], [ %cond.i, %if.end5.i ], [ 0, %cond.end ]
  %tobool.not = icmp eq i64 %cond16, 0
  br i1 %tobool.not, label %if.then17, label %if.end19
if.then17:
  %is_damaged18 = getelementptr inbounds nuw i8, ptr %chunk, i64 72
  store i64 1, ptr %is_damaged18, align 8
  br label %while.end
if.end19:
  %arrayidx = getelementptr inbounds i64, ptr %offsets, i64 %count.0
  store i64 %offset.0, ptr %arrayidx, align 8
  %inc = add i64 %count.0, 1
  %arrayidx20 = getelementptr inbounds i64, ptr %ids, i64 %count.0
  store i64 %cond, ptr %arrayidx20, align 8
  %add21 = add i64 %offset.0, %cond16
  br label %while.cond
while.end:
  %end = getelementptr inbounds nuw i8, ptr %chunk, i64 64
  store i64 %offset.0, ptr %end, align 8
  ret i64 %count.0
}
define dso_local i64 @records_copy(ptr %data, ptr %offsets, ptr %ids, i64 %count, ptr %groups, ptr %all) #0 {
entry:
  br label %for.cond
for.cond:
  %n.0 = phi i64 [ 0, %entry ], [ %inc, %for.inc17 ]
  %cmp = icmp ult i64 %n.0, %count
  br i1 %cmp, label %for.body, label %for.end18
for.body:
  %arrayidx = getelementptr inbounds i64, ptr %ids, i64 %n.0
  %0 = load i64, ptr %arrayidx, align 8
  %arrayidx1 = getelementptr inbounds i16, ptr %groups, i64 %0
  %1 = load i16, ptr %arrayidx1, align 2
  %idx.ext = zext i16 %1 to i64
  %add.ptr = getelementptr inbounds nuw %struct.group, ptr %all, i64 %idx.ext
  %arrayidx2 = getelementptr inbounds i64, ptr %offsets, i64 %n.0
  %2 = load i64, ptr %arrayidx2, align 8
  %add.ptr3 = getelementptr inbounds i8, ptr %data, i64 %2
  %3 = load ptr, ptr %add.ptr, align 8
  %add.ptr.i = getelementptr inbounds nuw i8, ptr %add.ptr3, i64 24
  %4 = load i64, ptr %add.ptr.i, align 1
  %add.ptr2.i = getelementptr inbounds nuw i8, ptr %add.ptr3, i64 32
  %5 = load i64, ptr %add.ptr2.i, align 1
  %sub.i9 = add i64 %4, -72340172838076673
  %not.i10 = xor i64 %4, -1
  %and.i11 = and i64 %sub.i9, %not.i10
  %and1.i12 = and i64 %and.i11, -9187201950435737472
  %tobool.i13.not = icmp eq i64 %and1.i12, 0
  %sub2.i17 = sub i64 0, %and1.i12
  %and3.i18 = and i64 %and1.i12, %sub2.i17
  %shr.i19 = lshr exact i64 %and3.i18, 7
  %sub4.i20 = add nsw i64 %shr.i19, -1
  %cond.i15 = select i1 %tobool.i13.not, i64 -1, i64 %sub4.i20
  br label %for.cond.i
for.cond.i:
  %at.i.0 = phi i64 [ 0, %for.body ], [ %add.i, %for.body.i ]
  %cmp.i = icmp samesign ult i64 %at.i.0, 24
  br i1 %cmp.i, label %for.body.i, label %for.end.i
for.body.i:
  %add.ptr4.i = getelementptr inbounds nuw i8, ptr %add.ptr3, i64 %at.i.0
  %6 = load i64, ptr %add.ptr4.i, align 1
  %add.ptr6.i = getelementptr inbounds nuw i8, ptr %3, i64 %at.i.0
  store i64 %6, ptr %add.ptr6.i, align 1
  %add.i = add nuw nsw i64 %at.i.0, 8
  br label %for.cond.i
for.end.i:
  %and.i = and i64 %4, %cond.i15
  %add.ptr8.i = getelementptr inbounds nuw i8, ptr %3, i64 24
  store i64 %and.i, ptr %add.ptr8.i, align 1
  %tobool.i.not = icmp eq i64 %cond.i15, -1
  br i1 %tobool.i.not, label %cond.false.i, label %copy_header.exit
cond.false.i:
  %sub.i = add i64 %5, -72340172838076673
  %not.i1 = xor i64 %5, -1
  %and.i2 = and i64 %sub.i, %not.i1
  %and1.i = and i64 %and.i2, -9187201950435737472
  %tobool.i3.not = icmp eq i64 %and1.i, 0
  %sub2.i = sub i64 0, %and1.i
  %and3.i = and i64 %and1.i, %sub2.i
  %shr.i = lshr exact i64 %and3.i, 7
  %sub4.i = add nsw i64 %shr.i, -1
  %cond.i5 = select i1 %tobool.i3.not, i64 -1, i64 %sub4.i
  %and11.i = and i64 %5, %cond.i5
  br label %copy_header.exit
copy_header.exit:
  %cond.i = phi i64 [ %and11.i, %cond.false.i ], [ 0, %for.end.i ]
  %add.ptr13.i = getelementptr inbounds nuw i8, ptr %3, i64 32
  store i64 %cond.i, ptr %add.ptr13.i, align 1
  br label %for.cond4
for.cond4:
  %at.0 = phi i64 [ 40, %copy_header.exit ], [ %add, %for.body7 ]
  %size = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %7 = load i64, ptr %size, align 8
  %cmp5 = icmp ult i64 %at.0, %7
  br i1 %cmp5, label %for.body7, label %for.end
for.body7:
  %add.ptr8 = getelementptr inbounds i8, ptr %add.ptr3, i64 %at.0
  %8 = load i64, ptr %add.ptr8, align 1
  %9 = load ptr, ptr %add.ptr, align 8
  %add.ptr10 = getelementptr inbounds i8, ptr %9, i64 %at.0
  store i64 %8, ptr %add.ptr10, align 1
  %add = add i64 %at.0, 8
  br label %for.cond4
for.end:
  %size12 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %10 = load i64, ptr %size12, align 8
  %11 = load ptr, ptr %add.ptr, align 8
  %add.ptr14 = getelementptr inbounds i8, ptr %11, i64 %10
  store ptr %add.ptr14, ptr %add.ptr, align 8
  %starts = getelementptr inbounds nuw i8, ptr %add.ptr, i64 8
  %12 = load ptr, ptr %starts, align 8
  %tobool.not = icmp eq ptr %12, null
  br i1 %tobool.not, label %for.inc17, label %if.then
if.then:
  %arrayidx15 = getelementptr inbounds i64, ptr %offsets, i64 %n.0
  %13 = load i64, ptr %arrayidx15, align 8
  %starts16 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 8
  %14 = load ptr, ptr %starts16, align 8
  %incdec.ptr = getelementptr inbounds nuw i8, ptr %14, i64 8
  store ptr %incdec.ptr, ptr %starts16, align 8
  store i64 %13, ptr %14, align 8
  br label %for.inc17
for.inc17:
  %inc = add i64 %n.0, 1
  br label %for.cond
for.end18:
  ret i64 %count
}
